"""Line charts as SVG, for the results of benchmarks. Needs matplotlib (the `bench` extra)."""

from collections.abc import Mapping, Sequence
from pathlib import Path

Points = tuple[Sequence[float], Sequence[float]]


def save_line_chart(
    path: Path,
    series: Mapping[str, Points],
    *,
    title: str,
    x_label: str,
    y_label: str,
    has_log_x: bool = False,
    dashed: Sequence[str] = (),
) -> None:
    """Write a chart of named series of (x, y) points; the same points give the same file. `dashed` names references."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = path.name
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, (xs, ys) in series.items():
        axes.plot(xs, ys, "--" if name in dashed else "-o", label=name, markersize=4)
    if has_log_x:
        axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
