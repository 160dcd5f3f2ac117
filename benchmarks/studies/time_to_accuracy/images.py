"""Made images in files of CIFAR-10's form, to be learned where CIFAR-10 itself is not at hand."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np

#: as the files of CIFAR-10 are called
TRAIN_FILES, TEST_FILE = [f"data_batch_{number}" for number in range(1, 6)], "test_batch"
#: of a class's cloud; the other one has 0.1
_STRENGTH = 0.25


def make_images(folder: Path, num_train: int = 4000, num_test: int = 500, seed: int = 0) -> None:
    """Writes made images as CIFAR-10's "python version" has them: what `images_training` reads.

    A class is a cloud of colours; an image shows it, moved by up to 3 points to every side and more or less
    bright, under another cloud, which no other image has, and under noise.

    Args:
        folder: made if it is not there.
        num_train: images, in five files.
        num_test: images, in one.
        seed: of all that is drawn.
    """
    generator = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    clouds = [_cloud(generator) for _ in range(10)]
    for name, count in [*((name, num_train // 5) for name in TRAIN_FILES), (TEST_FILE, num_test)]:
        labels = generator.permutation(np.arange(count) % 10)
        images = np.stack([_image(clouds[label], generator) for label in labels])
        data = {b"data": images.reshape(count, -1), b"labels": [int(label) for label in labels]}
        (folder / name).write_bytes(pickle.dumps(data))


def _cloud(generator: np.random.Generator) -> np.ndarray:
    """Six by six random colours, smoothly filled up to [3, 38, 38], of mean 0 and deviation 1."""
    places = np.linspace(0.0, 5.0, 38)
    low = np.minimum(places.astype(int), 4)
    weights = np.zeros((38, 6))
    weights[np.arange(38), low], weights[np.arange(38), low + 1] = 1.0 - (places - low), places - low
    filled = weights @ generator.normal(size=(3, 6, 6)) @ weights.T
    return (filled - filled.mean()) / filled.std()


def _image(cloud: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """One image of the class of this cloud, uint8 [3, 32, 32]."""
    down, right = generator.integers(7, size=2)
    cloud = cloud[:, down : down + 32, right : right + 32]
    image = _STRENGTH * generator.uniform(0.7, 1.3) * cloud
    image = image + 0.1 * _cloud(generator)[:, :32, :32] + generator.normal(0.0, 0.1, (3, 32, 32))
    return (255 * (0.5 + image).clip(0.0, 1.0)).astype(np.uint8)
