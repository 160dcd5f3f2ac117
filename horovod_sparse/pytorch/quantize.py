"""Every element into a few bits and back, in tensors: plain PyTorch, of the same bits as on the host."""

from __future__ import annotations

import torch
from torch import Tensor

from horovod_sparse.kernels.quantization import COUNTER, FIRST, SECOND, WORD, Quantization

#: elements that are worked on at once: what is made on the way takes a few times their memory
_CHUNK = 1 << 20
_MASK = 0xFFFFFFFF


def _groups(code: Quantization, num_elements: int) -> list[tuple[int, int]]:
    """[start, stop) of what is worked on at once: whole groups, or parts of one."""
    length = code.length_of_group(num_elements)
    step = max(1, _CHUNK // length) * length if length < _CHUNK else _CHUNK
    return [(start, min(start + step, num_elements)) for start in range(0, num_elements, step)]


def _norms(values: Tensor, code: Quantization) -> Tensor:
    """Of all groups, float64 with 24 significant bits."""
    n, length = values.numel(), code.length_of_group(values.numel())
    if length >= n:
        rows, counts = values.view(1, -1), torch.tensor([[max(1, n)]], device=values.device)
    else:
        rows = torch.nn.functional.pad(values, (0, -n % length)).view(-1, length)
        counts = torch.full((rows.shape[0], 1), length, device=values.device)
        counts[-1] = n - (rows.shape[0] - 1) * length
    tops = torch.linalg.vector_norm(rows, float("inf"), dim=1, keepdim=True).double()
    if code.norm == "max":
        return tops.view(-1)
    order = 1 if code.norm == "mean" else 2
    found = torch.linalg.vector_norm(rows, order, dim=1, keepdim=True, dtype=torch.float64)
    divided = counts if order == 1 else torch.ones_like(counts)
    found = found / divided
    # numbers near the ends of what float64 holds: by the largest
    bad = ((~torch.isfinite(found) | (found == 0)) & (tops > 0)).view(-1).nonzero().view(-1)
    if bad.numel():
        parts = rows[bad].double() / tops[bad]
        found[bad] = tops[bad] * torch.linalg.vector_norm(parts, order, dim=1, keepdim=True) / divided[bad]
    found = found.contiguous()
    bits = (found.view(torch.int64) + (1 << 28)) & -(1 << 29)
    coarse = bits.view(torch.float64)
    return torch.where((found > 1e-300) & torch.isfinite(found), coarse, found).view(-1)


def _packed(bits: Tensor) -> Tensor:
    """Words of 32 bits: bool [m, 32] to int64 [m], below 2^32."""
    places = torch.arange(WORD, device=bits.device)
    return (bits.long() << places).sum(1)


def _as_int32(words: Tensor) -> Tensor:
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def _drawn(start: int, stop: int, key: int, like: Tensor) -> Tensor:
    """See `kernels.quantization.random_bits`; over 2^24."""
    words = torch.arange(start, stop, device=like.device)
    words = (words * COUNTER + (key & _MASK)) & _MASK
    words = words ^ (words >> 16)
    words = ((words * FIRST) & _MASK) ^ (key >> 32)
    words = words ^ (words >> 15)
    words = ((words * SECOND) & _MASK) >> 8
    return words.to(like.dtype) * 2.0**-24


def encode(values: Tensor, code: Quantization, key: int) -> Tensor:
    """Units and codes of all values, as `kernels.host.quantize.encode` writes them.

    Args:
        values: float32 or float64 [n], finite.
        code: how.
        key: 64 bits, of the random numbers of levels.

    Returns:
        int32, on the same device.

    Example:
        >>> words = encode(torch.tensor([3.0, -1.0]), Quantization(), 0)
        >>> words[:1].view(torch.float32).tolist(), words[1].item()
        ([2.0], 2)
    """
    n = values.numel()
    largest = torch.finfo(values.dtype).max
    units = (_norms(values, code) / max(1, code.levels)).clamp_(max=largest).to(values.dtype)
    if code.levels:
        inverse = torch.where(units > 0, 1 / units, torch.zeros_like(units))
        units = torch.where(torch.isfinite(inverse), units, torch.zeros_like(units))
        inverse = torch.where(torch.isfinite(inverse), inverse, torch.zeros_like(inverse))
    length, words = code.length_of_group(n), []
    for start, stop in _groups(code, n):
        part = values[start:stop]
        planes = [part < 0]
        if code.levels:
            which = torch.arange(start, stop, device=values.device) // length
            sizes = part.abs() * inverse[which] + _drawn(start, stop, key, part)
            numbers = sizes.long().clamp_(max=code.levels)
            planes += [(numbers >> place & 1).bool() for place in range(code.planes - 1)]
        full = [torch.nn.functional.pad(plane, (0, -part.numel() % WORD)).view(-1, WORD) for plane in planes]
        words.append(torch.stack([_packed(plane) for plane in full], 1).view(-1))
    codes = torch.cat(words) if words else torch.empty(0, dtype=torch.int64, device=values.device)
    return torch.cat([units.view(torch.int32), _as_int32(codes)])


def take_away(values: Tensor, words: Tensor, code: Quantization, out: Tensor) -> None:
    """out = values less what the words stand for.

    Args:
        values: float32 or float64 [n].
        words: int32, as `encode` wrote them, on the same device.
        code: how.
        out: like values; may be values itself.
    """
    n = values.numel()
    at = code.num_units(n) * (values.element_size() // 4)
    units, codes = words[:at].view(values.dtype), words[at:].view(-1, code.planes)
    length = code.length_of_group(n)
    places = torch.arange(WORD, device=values.device, dtype=torch.int32)
    for start, stop in _groups(code, n):
        here = codes[start // WORD : -(-stop // WORD)]
        bits = (here.unsqueeze(2) >> places) & 1  # [words, planes, 32]
        which = torch.arange(start, stop, device=values.device) // length
        numbers = units[which]
        if code.levels:
            weights = 1 << torch.arange(code.planes - 1, device=values.device)
            levels = (bits[:, 1:] * weights.view(1, -1, 1)).sum(1).view(-1)[: stop - start]
            numbers = levels.to(values.dtype) * numbers
        below = bits[:, 0].reshape(-1)[: stop - start].bool()
        out[start:stop] = values[start:stop] - torch.where(below, -numbers, numbers)
