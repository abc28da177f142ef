"""Writes ``docs/performance.md`` and its plots from the results in ``bench/results``; ``--check`` says whether they gave it.

The page is a template with the figures left out, so no figure on it can be older than the results. No GPU is needed. Exit status:
0, or 1 when ``--check`` finds another page than the results give.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import jinja2
from common import geometric_mean
from problems import PEAK_BYTES_PER_S, PEAK_FLOPS_PER_S, Shape

HERE = Path(__file__).parent
RESULTS = HERE / "results"
DOCS = HERE.parent / "docs"
PAGE = DOCS / "performance.md"
PLOTS = DOCS / "performance"

# Group of the table: name, kind, values of M (any where empty).
GROUPS = (
    ("dense, M in {512, 4096}", "dense", (512, 4096)),
    ("dense, M in {64, 128}", "dense", (64, 128)),
    ("dense, M in {1, 16}", "dense", (1, 16)),
    ("grouped contiguous", "contiguous", ()),
    ("grouped masked", "masked", ()),
)
COLOURS = {"dense": "tab:blue", "contiguous": "tab:orange", "masked": "tab:green"}


def shape_of(row: dict[str, Any]) -> Shape:
    return Shape(row["kind"], row["groups"], row["max_m"], row["rows"], row["n"], row["k"])


def compared(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the listed rows that were timed on both sides."""
    return [row for row in record["rows"] if row["ratio"] is not None and not row.get("sampled")]


def groups(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what the table says of each group of shapes."""
    found = []
    for name, kind, sizes in GROUPS:
        some = [row for row in rows if row["kind"] == kind and (not sizes or row["rows"] in sizes)]
        if not some:
            continue
        worst = min(some, key=lambda row: row["ratio"])
        found.append(
            {
                "name": name,
                "shapes": len(some),
                "mean": geometric_mean(row["ratio"] for row in some),
                "worst": worst["ratio"],
                "where": shape_of(worst).label,
                "faster": sum(row["ratio"] > 1 for row in some),
                "floor": geometric_mean(
                    max(row["bytes_floor_us"], row["flops_floor_us"]) / row["ours"]["median_us"] for row in some
                ),
            }
        )
    return found


def page(results: dict[str, dict[str, Any]]) -> str:
    """Return the text of the page."""
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, keep_trailing_newline=True, trim_blocks=True, lstrip_blocks=True, autoescape=False
    )
    template = environment.from_string((HERE / "performance.md.j2").read_text(encoding="utf-8"))
    rows = compared(results["gemm"])
    return template.render(
        **results,
        groups=groups(rows),
        rows=[row | {"label": shape_of(row).label} for row in rows],
        peak_bytes=PEAK_BYTES_PER_S / 1e12,
        peak_flops=PEAK_FLOPS_PER_S / 1e12,
    )


def draw(rows: list[dict[str, Any]]) -> None:
    """Draw the roofline and the ratios."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    PLOTS.mkdir(exist_ok=True)
    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    for kind, colour in COLOURS.items():
        for side, marker, filled in (("ours", "o", colour), ("deep_gemm", "o", "none")):
            some = [(shape_of(row), row[side]["median_us"]) for row in rows if row["kind"] == kind]
            axes.scatter(
                [shape.flops / shape.operand_bytes for shape, _ in some],
                [shape.flops / us / 1e6 for shape, us in some],
                marker=marker, s=28, facecolors=filled, edgecolors=colour, linewidths=1,
                label=f"{kind}, {'deepgemm_jit' if side == 'ours' else 'DeepGEMM'}",
            )  # fmt: skip
    ridge = PEAK_FLOPS_PER_S / PEAK_BYTES_PER_S
    axes.plot([1, ridge, 4000], [PEAK_BYTES_PER_S / 1e12, PEAK_FLOPS_PER_S / 1e12, PEAK_FLOPS_PER_S / 1e12], color="black", lw=1)
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte of the operands", ylabel="TFLOP/s",
             title="FP8 GEMMs on one H200, and what its memory and its tensor cores allow")  # fmt: skip
    axes.grid(visible=True, which="both", alpha=0.2)
    axes.legend(fontsize=8)
    figure.savefig(PLOTS / "gemm_roofline.png", dpi=110, metadata={"Software": None})

    figure, axes = plt.subplots(figsize=(9, 9), layout="constrained")
    labels = [f"{row['kind']}: {shape_of(row).label}" for row in rows]
    axes.barh(labels, [row["ratio"] - 1 for row in rows], left=1, color=[COLOURS[row["kind"]] for row in rows])
    axes.axvline(1, color="black", lw=1)
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=6)
    axes.margins(y=0.01)
    axes.set(xlabel="DeepGEMM's time / ours", title="Above 1 we are faster")
    axes.grid(visible=True, axis="x", alpha=0.3)
    figure.savefig(PLOTS / "gemm_ratio.png", dpi=110, metadata={"Software": None})


def main() -> int:
    line = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    line.add_argument("--check", action="store_true", help="write nothing")
    options = line.parse_args()
    results = {name: json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")) for name in ("compile", "gemm", "host")}
    text = page(results)
    if options.check:
        same = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text
        print("docs/performance.md is what the results give" if same else "docs/performance.md is old: run bench/report.py")
        return 0 if same else 1
    PAGE.write_text(text, encoding="utf-8")
    draw(compared(results["gemm"]))
    print(f"written: {PAGE} and the plots in {PLOTS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
