"""What a training step keeps a GPU busy with: the time of its kernels, by kind."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from worldsize.bench import tables

OTHER = "other"
# By their names, of which the first that fits counts: those of Triton, ATen, cuDNN, cuBLAS and CUTLASS.
_KINDS = {
    "compiled": r"^triton_",
    "BatchNorm": r"batch_?norm|(?<![a-z])bn_[fb]w",
    "optimizer": r"multi_tensor_apply|lpnorm",
    "convolutions, products": r"fprop|dgrad|wgrad|convolve|winograd|gemm|gemv|nvjet|cutlass|splitk",
    "copies, fills": r"^mem(cpy|set)|copy_kernel|fillfunctor|catarray|nchwtonhwc|nhwctonchw",
}


@dataclass(frozen=True)
class Kernel:
    """All launches of one kernel in a step, or of one kind of copy. ``ms``: their time on the GPU together."""

    name: str
    launches: int
    ms: float

    @property
    def kind(self) -> str:
        """A column of `table`."""
        return next((kind for kind, names in _KINDS.items() if re.search(names, self.name, re.IGNORECASE)), OTHER)


def profiled(
    step: Callable[[], None], wait: Callable[[], None], of: ProfilerActivity = ProfilerActivity.CUDA
) -> list[Kernel]:
    """The kernels of one ``step``, the longest first; ``wait`` lets the GPU finish. On a CPU, torch's operations."""
    # There is only one cycle; but without acc_events, torch 2.12 warns that others would be forgotten.
    with profile(activities=[of], acc_events=True) as profiler:
        step()
        wait()
    events = [event for event in profiler.events() or () if event.device_type.name == of.name]
    return summed((event.name, event.time_range.elapsed_us() / 1000) for event in events)


def summed(launches: Iterable[tuple[str, float]]) -> list[Kernel]:
    """One `Kernel` for each name among the launches, which have a name and milliseconds."""
    found: dict[str, list[float]] = {}
    for name, ms in launches:
        found.setdefault(name, []).append(ms)
    return sorted((Kernel(name, len(all_ms), sum(all_ms)) for name, all_ms in found.items()), key=lambda k: -k.ms)


def table(by_form: Mapping[str, Iterable[Kernel]]) -> str:
    """A Markdown table: for each form of a step, the milliseconds of its kernels, in all and by kind."""
    kinds = [*_KINDS, OTHER]
    rows = [["GPU ms per step", "all", *kinds]]
    for form, kernels in by_form.items():
        spent = dict.fromkeys(kinds, 0.0)
        for kernel in kernels:
            spent[kernel.kind] += kernel.ms
        rows.append([form, *(f"{ms:.2f}" for ms in (sum(spent.values()), *spent.values()))])
    return tables.table(rows)


def write(path: Path, by_form: Mapping[str, Iterable[Kernel]]) -> None:
    """A line of JSON for each kernel of each form."""
    with open(path, "w", encoding="utf-8") as file:
        for form, kernels in by_form.items():
            for kernel in kernels:
                file.write(json.dumps({"form": form, "kind": kernel.kind, **asdict(kernel)}) + "\n")
