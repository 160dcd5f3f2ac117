"""The Triton kernels become machine code for GPUs, also where there is none.

Launches are recorded instead of carried out, so that exactly what the wrappers ask for is compiled, by this
file as a program of its own: kernels are either compiled or interpreted for the life of a process.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

from horovod_sparse.kernels.layout import Layout
from horovod_sparse.tensors.plain_kernels import int_type

CAPABILITIES = (80, 90)
launches: list[tuple[JITFunction, dict[str, Any], dict[str, Any]]] = []


def record(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    bound = dict(zip(self.arg_names, args, strict=False))
    bound.update({name: options.pop(name) for name in list(options) if name in self.arg_names})
    launches.append((self, bound, options))


def compiled(function: JITFunction, arguments: dict[str, Any], options: Any, capability: int) -> Any:
    signature, constants, attributes = {}, {}, {}
    for position, parameter in enumerate(function.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        signature[parameter.name] = mangle_type(value)
        if not isinstance(value, int) or (value % 16 == 0 and not parameter.do_not_specialize):
            attributes[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def stack_of(cubin: bytes) -> int:
    """Bytes of spilled registers, as the GPU's assembler left them."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        shown = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    return int(re.findall(r"STACK:(\d+)", shown.stdout)[0])


def launch_all(dtype: torch.dtype, gradient: torch.dtype) -> None:
    """Every wrapper once with a typical size; what comes back is not looked at."""
    from horovod_sparse.tensors import triton as triton_kernels

    layout = Layout(100_000, 128)
    n, k = layout.num_elements, 100
    values = torch.zeros(n, dtype=dtype)
    maxima = torch.zeros(layout.num_blocks, dtype=int_type(dtype))
    factors, norm = torch.ones(5, dtype=dtype), torch.zeros(1, dtype=torch.float64)
    indices = torch.arange(k, dtype=torch.int32)
    dense = torch.zeros(n, dtype=gradient)
    triton_kernels.fold(values, dense, maxima, layout, factors, norm, plain=True)
    for moment in (False, True):
        triton_kernels.fold(values, dense, maxima, layout, factors, norm, values.clone(), moment=moment)
    triton_kernels.scan_maxima(values, maxima, layout)
    triton_kernels.refresh_maxima(values, maxima, layout, indices)
    triton_kernels.raise_maxima(values, maxima, layout, indices)
    triton_kernels.at_least(values, maxima, layout, 1 << 29, 3, n - 3, 4 * k)
    triton_kernels.largest(values, maxima, layout, k, 0, n, False)
    triton_kernels.kth(values, maxima, layout, 50_000, 0, n, True)
    triton_kernels.count_at_least(values, maxima, layout, [1, 1 << 29])
    triton_kernels.moments(values, 1)
    triton_kernels.zero(values, indices)
    triton_kernels.put(values, indices, values[:k])
    triton_kernels.add(values, indices, values[:k])
    for unique in (True, False):
        triton_kernels.add_sum(dense, indices, torch.zeros(k, dtype=dtype), unique)


def main() -> None:
    JITFunction.run = record  # type: ignore[method-assign]
    for gradient in (torch.float32, torch.bfloat16, torch.float16):
        launch_all(torch.float32, gradient)
    launch_all(torch.float64, torch.float64)
    seen: set[str] = set()
    for function, arguments, options in launches:
        types = {name: str(one.dtype) for name, one in arguments.items() if isinstance(one, torch.Tensor)}
        constants = {name: one for name, one in arguments.items() if name.isupper()}
        key = f"{function.__name__} {types} {constants} {options}"
        if key in seen:
            continue
        seen.add(key)
        for capability in CAPABILITIES:
            kernel = compiled(function, arguments, options, capability)
            ptx = kernel.asm["ptx"]
            facts = {
                "kernel": function.__name__,
                "what": f"{key} {capability}",
                "wide_loads": len(re.findall(r"ld\.global[.\w:]*\.v4\.b32|ld\.global[.\w:]*\.v2\.b64", ptx)),
                "wide_stores": len(re.findall(r"st\.global[.\w:]*\.v4\.b32|st\.global[.\w:]*\.v2\.b64", ptx)),
                "fused": len(re.findall(r"\bfma\.rn\.f(?:32|64)", ptx)),
                "flushed": len(re.findall(r"\.ftz", ptx)),
                "stack": stack_of(kernel.asm["cubin"]),
            }
            print(json.dumps(facts))


@pytest.mark.nightly
def test_machine_code() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    run = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stderr
    facts = [json.loads(line) for line in run.stdout.splitlines()]
    assert {int(fact["what"].split()[-1]) for fact in facts} == set(CAPABILITIES)
    for fact in facts:
        # Contraction and flushing of subnormals would give other bits than the host. (A logarithm is a
        # polynomial, and promises no bits.)
        if fact["kernel"] != "_moments_kernel":
            assert fact["fused"] == fact["flushed"] == 0, fact
        assert fact["stack"] <= 16, fact  # registers suffice
    folds = [fact for fact in facts if fact["kernel"] == "_fold_kernel"]
    assert len(folds) == 16
    for fact in folds:
        assert fact["wide_loads"] >= 4 and fact["wide_stores"] >= 4, fact


if __name__ == "__main__":
    main()
