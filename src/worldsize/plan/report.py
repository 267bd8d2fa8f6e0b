"""Shows a prediction, and writes it as JSON."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worldsize.config.wording import count
from worldsize.errors import of_system
from worldsize.plan.arguments import Plan
from worldsize.plan.forecast import Forecast, Range
from worldsize.plan.prediction import FLAGS, Predicted
from worldsize.runs.atomic import write_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.table import Table

_CONTRADICTION = 0.1  # a larger difference between measurements and model is worth a warning

# The name, the unit and the factor from SI units of each parameter, in the unit of its flag; a time per image is shown as a
# rate.
_PARAMETERS = {
    "image_s": ("rate without fixed time", "images/s", 1.0),
    "pass_s": ("fixed time per pass", "ms", 1e3),
    "contention": ("slower per other device", "", 1.0),
    "jitter": ("jitter", "", 1.0),
    "link_latency_s": ("latency between machines", "us", 1e6),
    "link_bytes_per_s": ("usable network bandwidth", "Gbit/s", 8e-9),
    "local_latency_s": ("latency in a machine", "us", 1e6),
    "local_bytes_per_s": ("bandwidth in a machine", "GB/s", 1e-9),
}


def show(source: str, asked: Plan, predicted: Predicted) -> None:
    """Print the prediction as tables."""
    from worldsize.config import tables

    console = tables.console(highlight=False)
    # Paths may have brackets and colons.
    console.print(_headline(source, predicted), style="bold", markup=False, emoji=False)
    console.print(_calibrated(predicted), *predicted.calibration.notes, sep="\n", markup=False, emoji=False)
    console.print(_parameters(asked, predicted), "")
    console.print(_speed(predicted))
    console.print("\nShares of a step, and what would lift the bottleneck", style="bold")
    console.print(_parts(predicted), *map(_bottleneck, predicted.forecasts), sep="\n")
    console.print("\nNeeds, and shares of the run", style="bold")
    console.print(_needs(predicted))
    console.print(
        f"Cores for loading at {asked.feed.images_per_s_per_core:,.0f} images/s each. Memory without the framework's caches "
        "and workspaces. Ranges are from the 5th to the 95th percentile."
    )


def write(path: Path, source: str, asked: Plan, predicted: Predicted) -> None:
    """Write everything as JSON.

    Raises:
        UserError, StoreUnreachable: the file cannot be written.
    """
    try:
        write_json(path, as_json(source, asked, predicted))
    except OSError as error:
        raise of_system(f"--json {path}: {error.strerror}", error) from None


def as_json(source: str, asked: Plan, predicted: Predicted) -> dict[str, Any]:
    """Everything in SI units (seconds, bytes); ``value, low, high`` are the prediction and its 5th and 95th percentile."""
    job = predicted.job
    return {
        "format": "worldsize plan 1",
        "recipe": source,
        "model": job.recipe.model.name,
        "parameters": job.network.parameters,
        "multiply_adds_per_image": job.network.multiply_adds,
        "messages": [asdict(message) for message in job.traffic.messages],
        "scaling": _scaling(predicted),
        "from": [str(path) for path in asked.measured],
        "assumptions": asdict(asked.machines) | asdict(asked.feed),
        "fitted": {
            name: {
                "source": predicted.sources[name],
                "value": getattr(predicted.fitted.best, name),
                **_ends(predicted, name),
            }
            for name in FLAGS
        },
        "forecasts": [_forecast(f) for f in predicted.forecasts],
    }


def _ends(predicted: Predicted, name: str) -> dict[str, float]:
    low, high = predicted.fitted.interval(name)
    return {"low": low, "high": high}


def _forecast(forecast: Forecast) -> dict[str, Any]:
    kept = asdict(forecast)
    kept["step"] |= {"total_s": forecast.step.total_s}
    kept["batch_per_device"] = forecast.plan.per_process
    kept["global_batch"] = kept.pop("plan")["global_batch"]
    return kept


def _scaling(predicted: Predicted) -> str:
    return "strong" if predicted.job.recipe.per_process_batch is None else "weak"


# Text ---------------------------------------------------------------------------------------------------------------------


def _headline(source: str, predicted: Predicted) -> str:
    job, recipe = predicted.job, predicted.job.recipe
    batch = (
        f"global batch {recipe.global_batch:,} (strong scaling)"
        if recipe.per_process_batch is None
        else f"{recipe.per_process_batch:,} images per device (weak scaling: the global batch grows)"
    )
    return (
        f"{source}: {recipe.model.name}, {job.network.parameters / 1e6:.1f} M parameters, {job.traffic.size / 1e6:.1f} MB "
        f"per exchange; {job.images.train:,} images, {count(recipe.epochs, 'epoch')}, {batch}"
    )


def _calibrated(predicted: Predicted) -> str:
    count = len(predicted.calibration.measurements)
    if not count:
        return (
            "No measurements: these are assumptions. Measure with `worldsize bench scaling` or a short `worldsize train`, "
            "and pass the folders with --from."
        )
    sizes = sorted({m.cluster.devices for m in predicted.calibration.measurements})
    text = (
        f"Calibrated with {count} measurement{'s' * (count > 1)} at {', '.join(map(str, sizes))} "
        f"device{'s' * (sizes != [1])}; the model differs from them by at most {predicted.worst:.1%}."
    )
    if predicted.worst > _CONTRADICTION:
        text += " This is a large difference: the machine was perhaps busy with other work. Measure again, with more rounds "
        text += "or steps."
    return text


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0))
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
    return table


def _parameters(asked: Plan, predicted: Predicted) -> Table:
    table = _table("parameter", "value", "", "5th-95th", "source")
    for name, (title, unit, factor) in _PARAMETERS.items():
        value = getattr(predicted.fitted.best, name)
        low, high = predicted.fitted.interval(name)
        if name == "image_s":
            value, low, high = 1 / value, 1 / high, 1 / low
        shown = _with(Range(factor * value, factor * low, factor * high), _number).split("\n")
        table.add_row(title, shown[0], unit, shown[1], predicted.sources[name])
    table.add_row("devices per machine", str(asked.machines.devices_per_node), "", "", "")
    return table


def _speed(predicted: Predicted) -> Table:
    price = ["price"] if predicted.forecasts[0].price else []
    table = _table("devices", "batch", "step, ms", "images/s", "each", "efficiency", "run", *price)
    for f in predicted.forecasts:
        table.add_row(
            str(f.devices),
            f"{f.plan.per_process:,}",
            _with(f.step_s, lambda s: _number(1000 * s)),
            _with(f.images_per_s, _number),
            _number(f.images_per_s.value / f.devices),
            _with(f.efficiency, lambda e: f"{100 * e:.0f}", " %"),
            _duration(f.duration_s),
            *([_with(f.price, _number)] if f.price else []),
        )
    return table


def _with(value: Range, text: Callable[[float], str], unit: str = "") -> str:
    """The value and, in the next line, its interval."""
    return f"{text(value.value)}{unit}\n[dim]{text(value.low)}-{text(value.high)}[/]"


def _parts(predicted: Predicted) -> Table:
    table = _table("devices", "images", "fixed", "contention", "stragglers", "exposed messages", "waiting for images")
    for f in predicted.forecasts:
        s = f.step
        parts = (s.images_s, s.fixed_s, s.contention_s, s.straggler_s, s.exposed_s, s.data_s)
        table.add_row(str(f.devices), *(f"{part / s.total_s:.1%}" for part in parts))
    return table


def _bottleneck(forecast: Forecast) -> str:
    levers = ", ".join(f"{lever.change} {lever.gain:+.0%}" for lever in forecast.levers)
    text = f"{forecast.devices} device{'s' * (forecast.devices > 1)}: {forecast.bottleneck}."
    return f"{text} Images/s with {levers}." if levers else text


def _needs(predicted: Predicted) -> Table:
    table = _table("devices", "nodes", "cores each", "reads, MB/s", "memory each", "activations", "evaluation", "saving")
    for f in predicted.forecasts:
        table.add_row(
            str(f.devices),
            str(f.cluster.nodes),
            f"{f.cores_per_device:.2g}",
            _number(f.storage_bytes_per_s / 1e6),
            f"{sum(f.memory.values()) / 2**30:.1f} GiB",
            f"{f.memory['activations'] / 2**30:.1f} GiB",
            f"{f.evaluation_share:.1%}",
            f"{f.checkpoint_share:.1%}",
        )
    return table


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _duration(seconds: Range) -> str:
    """With an interval in the same unit."""
    units = (("d", 86400, 48 * 3600), ("h", 3600, 2 * 3600), ("min", 60, 120), ("s", 1, 0))
    name, unit = next((name, unit) for name, unit, least in units if seconds.value >= least)
    return _with(Range(*(s / unit for s in (seconds.value, seconds.low, seconds.high))), _number, f" {name}")
