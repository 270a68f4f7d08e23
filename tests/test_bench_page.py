"""The benchmark's page: one file, well-formed, with every row in it."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from paceline.actors.values import Stats
from paceline.cluster.bench_chart import Bar, Line, bars, lines
from paceline.cluster.bench_page import render, write_html
from paceline.cluster.bench_report import COLUMNS, Report, about, as_text
from paceline.cluster.bench_stats import Answer, Case, Group, Tally


def report(drafter: str = "oracle:alpha=0.8,cost=0.1") -> Report:
    made = Report(about(["paceline", "bench", "run"], {"target": "tiny", "drafters": [drafter]}))
    cases = [
        Case("paceline", "plain", drafter, drafter, 1, 0.0, 1, "float32", synthetic=True),
        Case("paceline", "sync", drafter, drafter, 1, 0.0, 2, "float32", synthetic=True, k=4),
        Case("llama.cpp", "Q4_1", "none", drafter, 1, 0.0, 2, "Q4_1"),
    ]
    for size, case in enumerate(cases, start=1):
        stats = Stats(case.schedule, 8 * size, 4, 3, 1, 0.5, ((4, 3), (4, 1))) if case.system == "paceline" else None
        answer = Answer(tuple(range(1 + 2 * size)), ((0.5, 1), (1.0, size), (1.5, size)), 1.5, stats)
        tally = Tally()
        tally.add(Group((answer,), 1.5), Group((answer,), 1.5))
        made.put([tally.row(case, 2.0, 3.0 if stats else None)])
    made.complete = True
    return made


class Page(HTMLParser):
    """Notes what is left open, the cells of the tables, and what would be loaded from elsewhere."""

    VOID = ("meta", "br", "link", "img")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self.loaded += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "xlink:href")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "td":
            self.cells.append(data)


def test_the_page_is_one_wellformed_file_with_every_row(tmp_path: Path):
    made = report()
    write_html(tmp_path / "page.html", made)
    text = (tmp_path / "page.html").read_text()
    page = Page(text)
    assert page.open == []
    assert page.loaded == []
    assert "url(" not in text
    width = 1 + len(COLUMNS)
    assert page.cells[::width] == [row.label for row in made.rows]
    assert f"{made.rows[1].tokens_per_s:.2f}" in page.cells
    figures = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    assert len(figures) == 5
    for figure in figures:
        ElementTree.fromstring(figure)
    assert 'class="synthetic"' in figures[0]
    assert 'class="peer"' in figures[0]
    assert "(synthetic), batch 1" in text
    assert "synthetic: an oracle" in text


def test_names_cannot_break_the_page():
    text = render(report(drafter='<b>&"x'))
    assert "<b>" not in text
    assert "&lt;b&gt;&amp;" in text
    assert Page(text).open == []


def test_the_same_stands_in_the_table_for_the_terminal():
    text = as_text(report())
    title, head, *rows = text.splitlines()[:5]
    assert title == "drafter oracle:alpha=0.8,cost=0.1 (synthetic), batch 1, temperature 0, float32"
    assert head.split()[:2] == ["tokens/s", "/device"]
    assert [row[:20].rstrip() for row in rows] == ["plain", "sync k=4 (synthetic)", "llama.cpp Q4_1 x2"]
    assert "synthetic: an oracle" in text


def test_an_unfinished_report_says_so():
    made = report(drafter="ngram")
    made.complete = False
    assert "cut short" in render(made)


def test_bars_are_as_long_as_their_values():
    text = bars("speed", [Bar("a", 1.0, "ours"), Bar("b", 2.0, "peer", upper=4.0), Bar("c", None, "ours")], 1, mark=3.0)
    widths = [float(width) for width in re.findall(r'<rect [^>]*width="([\d.]+)"', text)]
    assert widths[1] == pytest.approx(2 * widths[0], abs=0.2)
    assert "b: 2.0 – 4.0" in text
    assert "c:" not in text
    assert bars("nothing", [Bar("c", None, "ours")], 1) == ""


def test_lines_leave_out_what_is_not_known():
    text = lines("acceptance", [Line("a", (1.0, None, 0.5)), Line("b", ())])
    assert text.count("<circle") == 3  # two points and one in the legend
    assert ">b<" not in text
    assert lines("nothing", [Line("b", (None,))]) == ""
