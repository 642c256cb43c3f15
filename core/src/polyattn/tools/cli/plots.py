"""Plots of `run`, `bench`, `tune` and `explain`, with matplotlib where it is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyattn.errors import SettingsError
from polyattn.registry.distributions import find_spec
from polyattn.tools.cli.files import check_target

if TYPE_CHECKING:
    from polyattn.tools.replay.report import Report


FORMATS = (".png", ".svg", ".pdf", ".jpg")


def check_plot(path: Path) -> None:
    """Raise `SettingsError` when no plot can be written to `path`: before the work, not after."""
    if path.suffix.lower() not in FORMATS:
        raise SettingsError(f"--plot={path}: the name must end with one of {', '.join(FORMATS)}")
    check_target("--plot", path)
    if find_spec("matplotlib") is None:
        raise SettingsError('--plot needs matplotlib: pip install "polyattn[plot]"')


def _figure(rows: int, height: float) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(rows, 1, figsize=(9, height), layout="constrained", squeeze=False)


def plot_run(report: Report, path: Path) -> None:
    """Write each step's time and the cache's use over the run."""
    figure, axes = _figure(2, 6)
    steps = report.steps
    for decode, label, colour in (
        (False, "with prefill", "tab:orange"),
        (True, "decode only", "tab:blue"),
    ):
        chosen = [i for i, s in enumerate(steps) if s.decode is decode]
        axes[0, 0].scatter(
            chosen, [steps[i].seconds * 1e3 for i in chosen], s=8, label=label, color=colour
        )
    what = "model" if report.whole_model else "attention"
    axes[0, 0].set(ylabel=f"{what}, ms per step", yscale="log")
    axes[0, 0].legend()
    axes[1, 0].plot([s.cache_use * 100 for s in steps], color="tab:green")
    axes[1, 0].set(xlabel="step", ylabel="cache in use, %", ylim=(0, 100))
    figure.savefig(path, dpi=120)


def _points(
    axis: Any,
    values: Mapping[str, float],
    labels: Sequence[str],
    colours: Sequence[str],
    **texts: str,
) -> None:
    """Draw a labelled point for each name and value, from the top down, on a logarithmic axis."""
    axis.scatter(list(values.values()), list(values), c=colours)
    for (name, value), label in zip(values.items(), labels, strict=True):
        axis.annotate(f"  {label}", (value, name), verticalalignment="center")
    axis.set(xscale="log", **texts)
    axis.xaxis.set_major_formatter("{x:,.9g}")
    axis.xaxis.set_minor_formatter("")  # the points have their numbers
    axis.grid(axis="x", which="both", alpha=0.3)
    axis.margins(x=0.15, y=0.2)
    axis.invert_yaxis()


def plot_bench(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Write a point for each backend and batch, grouped by batch, the choice in a darker colour."""
    batches = list(dict.fromkeys(row["batch"] for row in rows))
    figure, axes = _figure(len(batches), 0.8 + 0.35 * len(rows) + 0.6 * len(batches))
    for axis, batch in zip(axes[:, 0], batches, strict=True):
        shown = [row for row in rows if row["batch"] == batch]
        colours = ["tab:blue" if row["selected"] else "lightsteelblue" for row in shown]
        axis.axvline(shown[0]["limit_ms"], color="tab:red", linestyle="--")
        _points(
            axis,
            {row["backend"]: row["ms"] for row in shown},
            [f"{row['over_best']:.2f}" for row in shown],
            colours,
            title=batch,
            xlabel="ms (dashed: the machine's limit); the numbers are ratios to the best",
        )
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def plot_values(
    groups: Mapping[str, Mapping[str, float]], path: Path, title: str, unit: str
) -> None:
    """Write a point for each name and value, a panel for each group."""
    count = sum(map(len, groups.values()))
    figure, axes = _figure(len(groups), 0.8 + 0.35 * count + 0.6 * len(groups))
    for axis, (group, values) in zip(axes[:, 0], groups.items(), strict=True):
        labels = [f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" for value in values.values()]
        _points(axis, values, labels, ["tab:blue"] * len(values), title=group, xlabel=unit)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
