"""`make numbers`: every page is what it would write, and what it cannot write is an error."""

import re

import pytest

from make_numbers import PAGES, filled, main, number
from tables import TABLES
from tables.common import table

from .blocks import ROOT

ANY = "trust.er.ece"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_page_is_up_to_date(page):
    text = page.read_text("utf-8")
    assert filled(text) == text, "run `make numbers`"
    assert "{{" not in text
    assert not re.search(r"\?<!--", text)


def test_every_table_is_on_a_page():
    asked = {mark.split()[0] for page in PAGES for mark in re.findall(r"<!-- (.*):begin -->", page.read_text("utf-8"))}
    assert asked == set(TABLES)


def test_only_what_stands_before_the_comment_is_written():
    ece = number(ANY)
    for around in (
        "({} %)",
        "| a | {} |",
        "**{}**",
        "± {}",
        "±{}",
        "={}, and",
        "{}. 12",
        "3 to {}%",
        "a - {}",
        "\u00a0{}",
    ):
        for old in ("?", "0.1", "−4.25", "12,345.0"):
            marked = around.format(f"{old}<!-- {ANY} -->")
            assert filled(marked) == around.format(f"{ece}<!-- {ANY} -->"), marked
    both = f"1<!-- {ANY}:.0f -->/2<!-- {ANY}:.2f -->"
    assert filled(both) == f"{number(ANY, '.0f')}<!-- {ANY}:.0f -->/{number(ANY, '.2f')}<!-- {ANY}:.2f -->"
    assert filled(f"?<!--\n{ANY}\n-->") == f"{ece}<!--\n{ANY}\n-->", "a line may end within the comment"
    assert filled('<!-- test: append "--tasks 2" -->\n') == '<!-- test: append "--tasks 2" -->\n'


@pytest.mark.parametrize(
    ("value", "form", "written"),
    [
        (-0.44, "+.1f", "−0.4"),
        (0.44, "+.1f", "+0.4"),
        (-0.44, ".1f", "−0.4"),
        (9380, ",.0f", "9,380"),
        (1234567, ",d", "1,234,567"),
        (0.49, ".0%", "49%"),
        (-1234.5, "+,.2f", "−1,234.50"),
        (0.2, "g", "0.2"),
    ],
)
def test_signs_commas_and_percent_signs_belong_to_the_number(value, form, written, monkeypatch):
    monkeypatch.setattr("make_numbers.measured", lambda file: {"found": [value]})
    once = filled(f"a ?<!-- any.found.0:{form} --> b")
    assert once == f"a {written}<!-- any.found.0:{form} --> b"
    assert filled(once) == once


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("a\n7<!-- no-such-file.x -->", r"^line 2: .*no number no-such-file\.x .*No such file"),
        ("7<!-- trust.er.nothing -->", r"^line 1: .*no number trust\.er\.nothing .*KeyError"),
        ("7<!-- trust.er -->", "no number trust.er to be written as .1f"),
        ("7<!-- trust.er.ece:d -->", "no number trust.er.ece to be written as d"),
        ("7<!-- trainer-h200.device:s -->", "'NVIDIA H200', which would not be found again"),
        ("<!-- trust.er.ece -->", "directly before <!-- trust.er.ece --> must be a number"),
        ("7 <!-- trust.er.ece -->", "must be a number"),
        ("v7<!-- trust.er.ece -->", "must be a number"),
        ("-7<!-- trust.er.ece -->", "must be a number"),
        ("++7<!-- trust.er.ece:+.1f -->", "must be a number"),
        ("<!-- agreement -->", "must be a number"),
        ("+7<!-- trust.er.ece -->", r"of \+7; if it may, put \?"),
        ("7%<!-- trust.er.ece -->", r"of 7%; if it may, put \?"),
        (
            "a\n\n<!-- nothing:begin -->\n<!-- nothing:end -->",
            "^line 3: there is no table nothing; there are agreement,",
        ),
        ("<!-- lag:begin -->\n", "^line 1: the next mark of a table must be <!-- lag:end -->"),
        ("<!-- lag:begin -->\n<!-- few:begin -->\n<!-- few:end -->\n<!-- lag:end -->", "must be <!-- lag:end -->"),
        ("<!-- lag:begin -->\n<!-- lag:begin -->\n<!-- lag:end -->", "must be <!-- lag:end -->"),
        ("a\n<!-- lag:end -->", "^line 2: <!-- lag:end --> ends what was not begun"),
        ("<!-- candidates:begin -->\n<!-- candidates:end -->", "the table candidates cannot be made .*epochs"),
        ("<!-- findings no:begin -->\n<!-- findings no:end -->", "findings no cannot be made .*cannot be read"),
        ("<!-- language x:begin -->\n<!-- language x:end -->", "the table language x cannot be made .*KeyError"),
    ],
)
def test_what_cannot_be_filled_is_an_error(page, said):
    with pytest.raises(ValueError, match=said):
        filled(page)


def test_a_page_that_cannot_be_filled_is_named_and_left(tmp_path, monkeypatch, capsys):
    good, bad = tmp_path / "good.md", tmp_path / "bad.md"
    good.write_text(f"?<!-- {ANY} -->")
    bad.write_text(f"?<!-- {ANY} --> and 1<!-- no-such-file.x -->")
    monkeypatch.setattr("make_numbers.PAGES", [bad, good])
    monkeypatch.setattr("make_numbers.ROOT", tmp_path)
    before = bad.read_text()
    with pytest.raises(SystemExit, match=r"^bad\.md, line 1: there is no number"):
        main()
    assert bad.read_text() == before
    assert good.read_text() == f"{number(ANY)}<!-- {ANY} -->"
    assert capsys.readouterr().out == "wrote good.md\n"


def test_make_knows_the_command():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    rule = makefile.partition("\nnumbers:")[2].partition("\n\n")[0]
    assert rule.split()[-1] == "docs/make_numbers.py"
    assert (ROOT / "docs" / "make_numbers.py").exists()


def test_columns_of_a_table():
    shown = table(["", "a", "b"], [["x", "1", ""], ["y", "2", "so"]], words=1)
    assert shown == "| | a | b |\n|---|---:|---|\n| x | 1 | |\n| y | 2 | so |"
