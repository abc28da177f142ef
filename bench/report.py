"""Writes the pages of figures from the results in ``bench/results``; ``--check`` says whether they gave them.

They are ``docs/performance.md`` with its plots, and what ``docs/multi-device.md`` says of runs over all GPUs. Both are templates
with the figures left out, so no figure can be older than the results. No GPU is needed. Exit status: 0, or 1 when ``--check``
finds another page than the results give.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import jinja2
from common import geometric_mean
from many_gpus import claims_of
from problems import PEAK_BYTES_PER_S, PEAK_FLOPS_PER_S, Shape

HERE = Path(__file__).parent
RESULTS = HERE / "results"
DOCS = HERE.parent / "docs"
PAGE = DOCS / "performance.md"
PLOTS = DOCS / "performance"
MULTI_DEVICE = DOCS / "multi-device.md"
BEGIN, END = "<!-- what bench/report.py writes -->\n", "<!-- and no further -->\n"

# Group of the table: name, kind, values of M (any where empty).
GROUPS = (
    ("dense, M in {512, 4096}", "dense", (512, 4096)),
    ("dense, M in {64, 128}", "dense", (64, 128)),
    ("dense, M in {1, 16}", "dense", (1, 16)),
    ("grouped contiguous", "contiguous", ()),
    ("grouped masked", "masked", ()),
)
NAMES = ("bf16", "compile", "decode", "experts", "gemm", "host")
SIDES = {
    "ours": ("deepgemm_jit", "tab:blue"),
    "bf16": ("transformers, bf16 grouped_mm", "tab:gray"),
    "deep_gemm": ("transformers, DeepGEMM", "tab:orange"),
}
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


def experts_rows(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what the table of experts forwards says, one row a layer and number of tokens."""
    shown = []
    for row in record["rows"]:
        extra = [row.get(f"{side}_extra_bytes") for side in ("ours", "deep_gemm")]
        shown.append(row | {"memory": extra[0] / extra[1] if all(extra) else None})
    return shown


def decode_groups(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return geometric means and worst ratios of GEMMs of few rows, and our time over that of reading the weights."""
    found = []
    for sizes in ((1, 16), (64, 128)):
        some = [row for row in record["rows"] if row["m"] in sizes]
        group: dict[str, Any] = {"name": f"M in {{{sizes[0]}, {sizes[1]}}}"}
        for way, ratio in (("", "ratio"), ("_dependent", "ratio_dependent"), ("_constant_weights", "ratio_constant_weights")):
            group[f"mean{way}"] = geometric_mean(row[ratio] for row in some)
            group[f"worst{way}"] = min(row[ratio] for row in some)
            group[f"stream{way}"] = geometric_mean(row[f"ours{way}_us"] / row["stream_us"] for row in some)
        found.append(group)
    return found


def page(results: dict[str, dict[str, Any]]) -> str:
    """Return the text of the page."""
    rows = compared(results["gemm"])
    return _template("performance").render(
        **results,
        groups=groups(rows),
        rows=[row | {"label": shape_of(row).label} for row in rows],
        forwards=experts_rows(results["experts"]),
        decoding=decode_groups(results["decode"]),
        bf16_rows=[row | {"label": shape_of(row).label} for row in results["bf16"]["rows"]],
        peak_bytes=PEAK_BYTES_PER_S / 1e12,
        peak_flops=PEAK_FLOPS_PER_S / 1e12,
    )


def many_gpus_part(runs: list[dict[str, Any]]) -> str:
    """Return what the page of several devices says of runs over all GPUs of a machine."""
    told = [run | {"claims": claims_of(run)} for run in runs if run["gpus"]]
    return _template("many_gpus").render(runs=told)


def with_part(text: str, part: str) -> str:
    """Return a page with another part between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + part + END + after


def _template(name: str) -> jinja2.Template:
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, keep_trailing_newline=True, trim_blocks=True, lstrip_blocks=True, autoescape=False
    )
    return environment.from_string((HERE / f"{name}.md.j2").read_text(encoding="utf-8"))


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


def draw_experts(rows: list[dict[str, Any]]) -> None:
    """Draw the time of experts forwards over their tokens, a plot a layer."""
    import matplotlib.pyplot as plt

    layers = sorted({row["layer"] for row in rows})
    figure, plots = plt.subplots(1, len(layers), figsize=(5 * len(layers), 4.5), layout="constrained")
    for layer, axes in zip(layers, plots, strict=True):
        some = [row for row in rows if row["layer"] == layer]
        for side, (name, colour) in SIDES.items():
            for way, style in (("graph", "-"), ("eager", ":")):
                timed = [(row["tokens"], row[f"{side}_{way}_us"]) for row in some if f"{side}_{way}_us" in row]
                axes.plot(*zip(*timed, strict=True), style, marker="o", ms=3, color=colour, label=f"{name}, {way}")
        axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="us", title=layer)
        axes.grid(visible=True, which="both", alpha=0.2)
    plots[0].legend(fontsize=8)
    figure.savefig(PLOTS / "experts.png", dpi=110, metadata={"Software": None})


def main() -> int:
    line = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    line.add_argument("--check", action="store_true", help="write nothing")
    options = line.parse_args()
    results = {name: json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")) for name in NAMES}
    many = RESULTS / "many_gpus.json"
    runs = json.loads(many.read_text(encoding="utf-8"))["runs"] if many.is_file() else []
    texts = {PAGE: page(results), MULTI_DEVICE: with_part(MULTI_DEVICE.read_text(encoding="utf-8"), many_gpus_part(runs))}
    if options.check:
        old = [path for path, text in texts.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
        for path in texts:
            print(f"{path.name} is {'old: run bench/report.py' if path in old else 'what the results give'}")
        return 1 if old else 0
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    draw(compared(results["gemm"]))
    draw_experts(results["experts"]["rows"])
    print(f"written: {', '.join(map(str, texts))} and the plots in {PLOTS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
