"""Pictures and tables of the rows of kv_accuracy.py, after the figures and tables of arXiv 2501.06807."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from private_llm_cli.commands.plot import load_pyplot

Row = dict[str, Any]


def draw(rows: Path, prefix: Path) -> dict[str, str]:
    """Write PREFIX-*.png of all rows, and return the table of each part."""
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    pyplot = load_pyplot()
    tables = {}
    for part, picture, table in (
        ("scores", scores, scores_table), ("levels", None, levels_table), ("sharing", sharing, sharing_table),
        ("observed", observed, observed_table), ("likeness", likeness, likeness_table),
        ("commonality", commonality, commonality_table),
    ):  # fmt: skip
        own = latest(row for row in found if row["part"] == part)
        if not own:
            continue
        if picture is not None:
            figure = picture(pyplot, own)
            figure.tight_layout()
            figure.savefig(f"{prefix}-{part}.png", dpi=110)
            pyplot.close(figure)
        tables[part] = table(own)
    return tables


def latest(rows: Iterable[Row]) -> list[Row]:
    """Of rows of the same question, the last that was written."""
    results = {"score", "whole", "same", "loss", "attended", "held", "seconds", "coverage", "by_layer_and_head"}
    found = {json.dumps({k: v for k, v in row.items() if k not in results}, sort_keys=True): row for row in rows}
    return list(found.values())


def distinct(rows: Iterable[Row], key: str) -> list[Any]:
    """Values of a key, in order of appearance."""
    return list(dict.fromkeys(row[key] for row in rows))


def panels(pyplot: Any, rows: Sequence[Row], draw_one: Callable[[Any, list[Row]], None]) -> Any:  # noqa: ANN401
    """A picture for each task and length."""
    cells = list(dict.fromkeys((row["task"], row["length"]) for row in rows))
    columns = min(4, len(cells))
    lines = -(-len(cells) // columns)
    figure, axes = pyplot.subplots(lines, columns, figsize=(4.2 * columns, 3.6 * lines), squeeze=False)
    for axis in axes.flat[len(cells) :]:
        axis.axis("off")
    for (task, length), axis in zip(cells, axes.flat, strict=False):
        draw_one(axis, [row for row in rows if (row["task"], row["length"]) == (task, length)])
        axis.set_title(f"{task}, {length} tokens", fontsize=10)
    axes[0][0].legend(fontsize=7)
    return figure


def value(row: Row) -> float:
    """Per cent of right tokens; of a text that goes on, of tokens that are those of the full cache."""
    return 100 * float(row["same"] if row["task"] == "text" else row["score"])


def scores(pyplot: Any, rows: Sequence[Row]) -> Any:  # noqa: ANN401
    """Figure 9."""

    colours = {name: f"C{number}" for number, name in enumerate(distinct(rows, "policy"))}

    def one(axis: Any, own: list[Row]) -> None:  # noqa: ANN401
        for name in distinct(own, "policy"):
            line = sorted((row["attended"], value(row)) for row in own if row["policy"] == name)
            if name == "full":
                axis.axhline(line[0][1], color="black", linestyle="--", linewidth=1, label=name)
            else:
                style = "-" if name.startswith("mpcache") else ":"
                places, heights = [100 * x for x, _ in line], [y for _, y in line]
                axis.plot(places, heights, style, color=colours[name], marker="o", markersize=3, label=name)
        axis.set_xlabel("entries attended to, % of the text")
        axis.set_ylabel("same tokens as the full cache, %" if own[0]["task"] == "text" else "answer tokens right, %")
        axis.set_ylim(-3, 103)

    return panels(pyplot, rows, one)


def sharing(pyplot: Any, rows: Sequence[Row]) -> Any:  # noqa: ANN401
    """Figure 12, apart for what is shared."""

    def one(axis: Any, own: list[Row]) -> None:  # noqa: ANN401
        for name in distinct(own, "policy"):
            line = sorted((row["layers"], value(row)) for row in own if row["policy"] == name)
            axis.plot([x for x, _ in line], [y for _, y in line], marker="o", label=f"shared: {name}")
        axis.set_xlabel("neighbouring layers that share")
        axis.set_ylabel("%")

    return panels(pyplot, rows, one)


def observed(pyplot: Any, rows: Sequence[Row]) -> Any:  # noqa: ANN401
    """By the share of the prompt whose attention decides."""

    def one(axis: Any, own: list[Row]) -> None:  # noqa: ANN401
        for pool in distinct(own, "pool"):
            line = sorted((row["observed"], value(row)) for row in own if row["pool"] == pool)
            name = "by itself" if pool == 1 else f"mean of {pool} neighbours"
            axis.semilogx([100 * x for x, _ in line], [y for _, y in line], marker="o", label=name)
        axis.set_xlabel("last queries whose attention counts, % of the prompt")
        axis.set_ylabel("%")

    return panels(pyplot, rows, one)


def likeness(pyplot: Any, rows: Sequence[Row]) -> Any:  # noqa: ANN401
    """Figure 7, by the share of attention that the chosen clusters hold."""

    def one(axis: Any, own: list[Row]) -> None:  # noqa: ANN401
        for kept in distinct(own, "kept"):
            line = [row for row in own if row["kept"] == kept]
            names = [row["similarity"] for row in line]
            axis.plot(names, [100 * mean(row["coverage"]) for row in line], "o", label=f"{kept:.0%} of clusters")
        axis.tick_params(axis="x", rotation=70, labelsize=7)
        axis.set_ylabel("attention in the chosen clusters, %")

    return panels(pyplot, rows, one)


def commonality(pyplot: Any, rows: Sequence[Row]) -> Any:  # noqa: ANN401
    """Figure 3c and, layer by layer with each key head, Figure 8."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6))
    for task, length in dict.fromkeys((row["task"], row["length"]) for row in rows):
        own = [row for row in rows if (row["task"], row["length"]) == (task, length)]
        line = sorted((row["neighbours"] + 1, 100 * flat_mean(row["by_layer_and_head"])) for row in own)
        left.plot([x for x, _ in line], [y for _, y in line], marker="o", label=f"{task}, {length}")
    chance = [100 * rows[0]["kept"] ** (x - 1) for x, _ in line]
    left.plot([x for x, _ in line], chance, "--", color="grey", label="by chance")
    left.set_xlabel("neighbouring layers")
    left.set_ylabel("top keys in common, %")
    left.legend(fontsize=7)
    pairs = next(row for row in rows if row["neighbours"] == 1)["by_layer_and_head"]
    for head, values in enumerate(zip(*pairs, strict=True)):
        right.plot([100 * one for one in values], marker=".", label=f"key head {head}")
    right.set_xlabel("layer, with the next one")
    right.legend(fontsize=7)
    return figure


# -- tables -----------------------------------------------------------------------------------------------------
def mean(values: Sequence[float]) -> float:
    """Arithmetic."""
    return sum(values) / len(values)


def flat_mean(parts: Sequence[Sequence[float]]) -> float:
    """Of lists of equal length."""
    return mean([mean(part) for part in parts])


def markdown(title: str, heads: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """A table under a heading."""
    made = [f"### {title}", "", f"| {' | '.join(heads)} |", f"|---{'|--:' * (len(heads) - 1)}|"]
    return "\n".join([*made, *(f"| {' | '.join(map(str, line))} |" for line in lines), ""])


def scores_table(rows: Sequence[Row]) -> str:
    """Figure 9 and Table 4."""
    budgets = [one for one in distinct(rows, "budget") if one < 1]
    made: dict[str, dict[str, str]] = {}
    names = distinct(rows, "policy")
    for task, length in dict.fromkeys((row["task"], row["length"]) for row in rows):
        own = [row for row in rows if (row["task"], row["length"]) == (task, length)]
        cells = {(row["policy"], row["budget"]): f"{value(row):.0f}" for row in own}
        full = next(row for row in own if row["policy"] == "full")
        column = made[f"{task}, {length} tokens, {full['prompts']} prompts"] = {}
        for name in distinct(own, "policy"):
            found = [cells.get((name, one), "-") for one in (budgets if name != "full" else (1.0,))]
            column[name] = ", ".join(found)
    of_text = "text: % of tokens as with the full cache"
    return markdown(
        f"% of answer tokens right ({of_text}) at budgets of {', '.join(f'{one:.0%}' for one in budgets)}",
        ["policy", *made],
        ([name, *(column.get(name, "") for column in made.values())] for name in names),
    )


def levels_table(rows: Sequence[Row]) -> str:
    """Table 6."""
    return markdown(
        "Levels of clusters, of 60 % that stay (Table 6)",
        ["levels", "task", "tokens", "attended, %", "right, %", "nats a token"],
        ([row["levels"], row["task"], row["length"], f"{100 * row['attended']:.1f}", f"{value(row):.0f}", row["loss"]]
         for row in rows),
    )  # fmt: skip


def side_by_side(
    title: str, heads: Sequence[str], rows: Iterable[Row], line: Callable[[Row], tuple[object, ...]],
    cells: Callable[[Row], dict[str, str]],
) -> str:  # fmt: skip
    """A table with a line for each `line` of the rows, and a column for each name that `cells` gives."""
    made: dict[tuple[object, ...], dict[str, str]] = {}
    for row in rows:
        made.setdefault(line(row), {}).update(cells(row))
    columns = list(dict.fromkeys(name for found in made.values() for name in found))
    lines = ([*key, *(found.get(name, "") for name in columns)] for key, found in made.items())
    return markdown(title, [*heads, *columns], lines)


def answers(row: Row) -> dict[str, str]:
    """Of a question, its tokens that are right and the nats."""
    return {f"{row['task']}, {row['length']} tokens": f"{value(row):.0f}, {row['loss']}"}


def sharing_table(rows: Sequence[Row]) -> str:
    """Figure 12, and whether followers share."""
    return side_by_side(
        "Neighbouring layers that share (1: each chooses for itself), at a budget of 20 %: % right, nats a token",
        ["what is shared", "layers"], rows, lambda row: (row["policy"], row["layers"]), answers,
    )  # fmt: skip


def observed_table(rows: Sequence[Row]) -> str:
    """Which queries decide."""
    return side_by_side(
        "Queries whose attention decides which 30 % stay, nothing else: % right, nats a token",
        ["last queries, % of the prompt", "smoothed over"], rows,
        lambda row: (f"{100 * row['observed']:g}", row["pool"]), answers,
    )  # fmt: skip


def likeness_table(rows: Sequence[Row]) -> str:
    """Figure 7."""

    def cells(row: Row) -> dict[str, str]:
        found = f"{100 * mean(row['coverage']):.1f}, {100 * min(row['coverage']):.1f}"
        where = f"{row['task']}, {row['length']} tokens, {100 * row['kept']:g} % of clusters of {row['size']}"
        return {where: found}

    return side_by_side(
        "Attention in the chosen clusters, by what ranks them, % (mean over layers, lowest layer)",
        ["similarity"], rows, lambda row: (row["similarity"],), cells,
    )  # fmt: skip


def commonality_table(rows: Sequence[Row]) -> str:
    """Figure 3c, and the first layers of Figure 8."""
    heads = ("all", "first two layers", "the others")
    return side_by_side(
        "Top keys that neighbouring layers have in common (equation 1), %",
        ["layers", "by chance"], rows,
        lambda row: (row["neighbours"] + 1, f"{100 * row['kept'] ** row['neighbours']:.1f}"),
        lambda row: {f"{row['task']}, {row['length']} tokens: {', '.join(heads)}":
                     ", ".join(filter(None, _common(row["by_layer_and_head"])))},
    )  # fmt: skip


def _common(layers: Sequence[Sequence[float]]) -> list[str]:
    parts = (layers, layers[:2], layers[2:])
    return [f"{100 * flat_mean(part):.1f}" if part else "" for part in parts]
