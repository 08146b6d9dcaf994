"""Compile every kernel for some GPUs, none of which is needed for it, and print the shared memory that each takes.

A program of its own, as a process that interprets kernels (conftest.py) cannot compile them.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from wardround.synthesis import kernels, stem

TILE = {"ROWS": kernels.ROWS, "CHANNELS": kernels.CHANNELS}
SUMS = {"PARTS": 512, "FEW": kernels.FEW}
STEM = {"COLOURS": 3, "DEPTH": 32, "ROWS": kernels.ROWS}
NUMBERS = {"rows", "channels", "blocks", "height", "width"}
MAPS = {"maps", "shortcut", "normed", "slope", "beside", "found", "passed"}


def variants(size: int) -> Iterator[tuple[Any, dict[str, int]]]:
    """Each kernel in the form that does the most."""
    loop = {**TILE, "STAGES": kernels.STAGES[size]}
    yield kernels._norm_kernel, {"SHORTCUT": 1, "RECTIFY": 1, "MEASURE": 1, "WRITE": 1, **loop}
    yield kernels._norm_kernel, {"SHORTCUT": 0, "RECTIFY": 0, "MEASURE": 1, "WRITE": 0, **loop}
    yield kernels._finish_kernel, {"FOLLOW": 1, **SUMS}
    yield kernels._slope_kernel, {"TWO": 1, "GATE": 1, **loop}
    yield kernels._slope_finish_kernel, SUMS
    for gate in (1, 2):
        yield kernels._backward_kernel, {"TWO": 1, "GATE": gate, "MEASURE": 1, "GAP": 1, "PASS": 1, **TILE}
    if size == 2:
        yield stem._forward_kernel, {"MEASURE": 1, "CHANNELS": kernels.CHANNELS, **STEM}
        yield stem._backward_kernel, {"TWO": 1, "MEASURE": 1, "CHANNELS": kernels.CHANNELS, **STEM}
        yield stem._gather_kernel, {"COLOURS": 3, "WIDE": 4, "ROWS": kernels.ROWS}


def shared_memory(kernel: Any, fixed: dict[str, int], size: int, gpu: int) -> int:
    pictures = {"images", "filters"} | MAPS

    def kind(name: str) -> str:
        if name in fixed:
            return "constexpr"
        if name in NUMBERS | {"eps", "share"}:
            return "i32" if name in NUMBERS else "fp32"
        return "*bf16" if name in pictures and size == 2 else "*fp32"

    signature = {name: kind(name) for name in kernel.arg_names}
    places = {name: (place,) for place, name in enumerate(kernel.arg_names)}
    even = [name for name, what in signature.items() if what[0] == "*" or name in ("rows", "channels")]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={places[name]: value for name, value in fixed.items()},
        attrs={places[name]: [["tt.divisibility", 16]] for name in even},
    )
    return int(triton.compile(source, target=GPUTarget("cuda", gpu, 32)).metadata.shared)


if __name__ == "__main__":
    found = [
        {"kernel": kernel.__name__, "gpu": gpu, "bytes": size, "shared": shared_memory(kernel, fixed, size, gpu)}
        for gpu in (86, 90)
        for size in (2, 4)
        for kernel, fixed in variants(size)
    ]
    sys.stdout.write(json.dumps(found))
