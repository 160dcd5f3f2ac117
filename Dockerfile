# horovod_sparse with PyTorch, TensorFlow, Open MPI and Horovod built for them, on CPUs.
#   docker build -t horovod-sparse .
#   docker run --rm --shm-size 1g horovod-sparse horovodrun --gloo -np 2 python examples/pytorch_mnist.py
# For GPUs begin with an image that has nvcc and NCCL's headers, and build with
#   --build-arg BASE=nvidia/cuda:12.9.1-devel-ubuntu22.04 --build-arg OPTIONS=--gpu
ARG BASE=debian:bookworm-slim
FROM ${BASE}
ARG OPTIONS=--locked
# pip's index of PyTorch's CPU wheels makes the image several gigabytes smaller: pass its address
ARG PIP_EXTRA_INDEX_URL=

RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ca-certificates g++ libc6-dev libopenmpi-dev make openmpi-bin openssh-client openssh-server \
        python3 python3-dev python3-venv && \
    rm -rf /var/lib/apt/lists/* && mkdir -p /run/sshd

WORKDIR /opt/horovod_sparse
COPY . .
# the cache holds the wheel of Horovod once more: not in the image
RUN scripts/setup ${OPTIONS} && rm -rf ~/.cache

ENV PATH=/opt/horovod_sparse/.venv/bin:$PATH VIRTUAL_ENV=/opt/horovod_sparse/.venv \
    OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
CMD ["horovod-sparse", "doctor"]
