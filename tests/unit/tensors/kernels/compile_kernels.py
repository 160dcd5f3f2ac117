"""Compiles every Triton kernel for GPUs that are not here; prints what the machine code shows, as JSON.

Launches are recorded instead of carried out, so that exactly what the wrappers ask for is compiled. Run as a
program of its own: kernels are either compiled or interpreted for the life of a process.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

from horovod_sparse.kernels.layout import Layout
from horovod_sparse.tensors import triton as triton_kernels
from horovod_sparse.tensors.plain_kernels import int_type

launches: list[tuple[JITFunction, dict[str, Any], dict[str, Any]]] = []


def record(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    bound = dict(zip(self.arg_names, args, strict=False))
    bound.update({name: options.pop(name) for name in list(options) if name in self.arg_names})
    launches.append((self, bound, options))


def compiled(
    function: JITFunction, arguments: dict[str, Any], options: dict[str, Any], capability: int
) -> Any:
    signature, constants, attributes = {}, {}, {}
    for position, parameter in enumerate(function.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        signature[parameter.name] = mangle_type(value)
        multiple = not isinstance(value, int) or (value % 16 == 0 and not parameter.do_not_specialize)
        if multiple:
            attributes[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def resources(cubin: bytes) -> dict[str, int]:
    """Registers per thread and bytes of stack (spilled registers), as the GPU's assembler left them."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        shown = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return {
        name: int(re.findall(rf"{word}:(\d+)", shown)[0])
        for name, word in (("registers", "REG"), ("stack", "STACK"))
    }


def launch_all(dtype: torch.dtype, gradient: torch.dtype) -> None:
    """Every wrapper once with a typical size; what comes back is not looked at."""
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
    capabilities = [int(argument) for argument in sys.argv[1:]]
    JITFunction.run = record  # type: ignore[method-assign]
    launch_all(torch.float32, torch.float32)
    launch_all(torch.float32, torch.bfloat16)
    launch_all(torch.float32, torch.float16)
    launch_all(torch.float64, torch.float64)
    seen: set[str] = set()
    for function, arguments, options in launches:
        shown = {
            name: str(value.dtype) if isinstance(value, torch.Tensor) else value
            for name, value in arguments.items()
            if isinstance(value, torch.Tensor) or name.isupper()
        }
        key = f"{function.__name__} {shown} {options}"
        if key in seen:
            continue
        seen.add(key)
        for capability in capabilities:
            kernel = compiled(function, arguments, options, capability)
            ptx = kernel.asm["ptx"]
            facts = {
                "kernel": function.__name__,
                "capability": capability,
                "arguments": shown,
                "options": options,
                "cubin_bytes": len(kernel.asm["cubin"]),
                "wide_loads": len(re.findall(r"ld\.global[.\w:]*\.v4\.b32|ld\.global[.\w:]*\.v2\.b64", ptx)),
                "wide_stores": len(re.findall(r"st\.global[.\w:]*\.v4\.b32|st\.global[.\w:]*\.v2\.b64", ptx)),
                "fused": len(re.findall(r"\bfma\.rn\.f(?:32|64)", ptx)),
                "flushed": len(re.findall(r"\.ftz", ptx)),
                "shared_bytes": kernel.metadata.shared,
                **resources(kernel.asm["cubin"]),
            }
            print(json.dumps(facts))


if __name__ == "__main__":
    main()
