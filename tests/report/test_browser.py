"""The page in a real browser."""

import pytest

from holdfast.report import gather, render_report, write_report
from holdfast.results import save

from .browser import Browser, chromium
from .conftest import PAPER, paper_run, run

pytestmark = pytest.mark.skipif(chromium() is None, reason="no chromium and chromedriver on PATH")

VISIBLE = "return document.querySelector('#experiment-table1 table').checkVisibility()"
ROWS = """
const table = [...document.querySelectorAll('#experiment-table1 table')].find(t => t.rows.length > 4);
return [...table.tBodies[0].rows].map(row => row.cells[0].textContent)
"""
HEADING = "[...document.querySelectorAll('#experiment-table1 table')].find(t => t.rows.length > 4).tHead.rows[0].cells"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    nasty = "<script>window.broken = 1</script><img src=x onerror='window.broken = 2'>"
    elsewhere = paper_run("barlow", 88.0, benchmark="rot-mnist")
    for result in (*PAPER, elsewhere, run("er", 80.0), run("l2", 85.0), run(nasty, 70.0, benchmark=nasty)):
        save(result, folder / "runs")
    return write_report(render_report(gather([folder / "runs"])), folder / "report.html")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def opened(browser, page):
    browser.resize(1280, 900)
    browser.prefer("light")
    browser.open(page)
    browser.run("localStorage.clear(); delete document.documentElement.dataset.theme")
    browser.open(page)
    return browser


def test_opens_without_errors_and_shows_the_tables(opened):
    assert opened.errors() == []
    assert opened.run(VISIBLE) is True
    assert opened.run("return window.broken === undefined")
    assert opened.run("return document.querySelectorAll('svg').length") >= 3
    box = opened.run("return document.querySelector('figure svg').getBoundingClientRect().toJSON()")
    assert box["width"] > 200
    assert box["height"] > 50


@pytest.mark.parametrize(("share", "beside"), [(1.0, True), (0.97, True), (0.9, False)])
def test_a_figure_stands_beside_its_table_though_it_is_a_little_too_wide(opened, share, beside):
    """Tables of one kind differ a little in width, and their figures would stand in different places."""
    found = opened.run(f"""
const row = [...document.querySelectorAll('.evidence > div')].find(each => each.querySelector('figure'));
const size = each => each.getBoundingClientRect(), table = row.firstElementChild, figure = row.querySelector('figure');
const whole = size(figure).width, gap = parseFloat(getComputedStyle(row).columnGap);
row.style.width = `${{size(table).width + gap + {share} * whole}}px`;
return [size(figure).top < size(table).bottom, size(figure).width / whole]
""")
    assert found[0] is beside
    assert found[1] == pytest.approx(share if beside else 1.0, abs=0.01)


def test_sorts_by_a_column_both_ways(opened):
    before = opened.run(ROWS)
    assert before[0] == "er"
    opened.run(f"{HEADING}[3].querySelector('button').click()")  # rot-mnist, published, mnist-360, published
    assert opened.run(ROWS) == ["mse", "l2", "er", "barlow"]
    assert opened.run(f"return {HEADING}[3].getAttribute('aria-sort')") == "descending"
    opened.run(f"{HEADING}[3].querySelector('button').click()")
    assert opened.run(ROWS) == ["er", "l2", "mse", "barlow"]  # rows without a number stay at the end
    assert opened.run(f"return {HEADING}[3].getAttribute('aria-sort')") == "ascending"
    opened.run(f"{HEADING}[4].querySelector('button').click()")
    assert opened.run(ROWS) == ["l2", "mse", "barlow", "er"]  # by the published numbers
    opened.run(f"{HEADING}[0].querySelector('button').click()")
    assert opened.run(ROWS) == sorted(before)
    assert opened.run(f"return {HEADING}[4].hasAttribute('aria-sort')") is False


def background(browser):
    return browser.run("return getComputedStyle(document.body).backgroundColor")


def test_switches_theme_and_remembers(opened, page):
    light = background(opened)
    assert light == "rgb(255, 255, 255)"
    opened.prefer("dark")
    dark = background(opened)
    assert dark != light
    button = "document.getElementById('theme')"
    assert opened.until(f"return {button}.textContent", "Light theme")
    opened.run(f"{button}.click()")
    assert background(opened) == light
    assert opened.run(f"return {button}.textContent") == "Dark theme"
    opened.open(page)
    assert background(opened) == light  # chosen by hand, although the system prefers dark
    opened.run(f"{button}.click()")
    line = "return getComputedStyle(document.querySelector('svg text')).fill"
    in_dark = opened.run(line)
    opened.run(f"{button}.click()")
    assert opened.run(line) != in_dark  # figures follow


UNFOLD = "document.querySelectorAll('details').forEach(block => block.open = true)"


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_fits_the_screen(opened, width):
    opened.resize(width, 800)
    assert opened.run("return document.documentElement.scrollWidth") <= width
    assert opened.run(VISIBLE) is True
    opened.run(UNFOLD)
    assert opened.run("return document.documentElement.scrollWidth") <= width


def test_wide_tables_scroll_inside_their_frame(opened):
    opened.resize(320, 800)
    inside = opened.run(
        """
        return [...document.querySelectorAll('#experiment-table1 .scroll')].map(frame => {
          frame.scrollLeft = 50;
          return [frame.scrollWidth - frame.clientWidth, frame.scrollLeft, frame.getBoundingClientRect().right];
        })
        """
    )
    assert any(beyond > 50 and moved == 50 for beyond, moved, _ in inside)
    assert all(right <= 320 for _, _, right in inside)


def test_figures_can_be_read_on_a_phone(opened):
    """No letter is smaller than 9 px, and charts of bars need no scrolling."""
    opened.resize(400, 800)
    opened.run(UNFOLD)
    found = opened.run(
        """
        return [...document.querySelectorAll('.picture')].map(picture => {
          const svg = picture.querySelector('svg');
          const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
          const letters = [...svg.querySelectorAll('text')].map(t => parseFloat(getComputedStyle(t).fontSize) * scale);
          return [picture.ariaLabel, Math.min(...letters), picture.scrollWidth - picture.clientWidth];
        })
        """
    )
    assert [name for name, smallest, _ in found if smallest < 9] == []
    bars = {name: beyond for name, _, beyond in found if name.startswith(("Accuracy (%)", "Final accuracy"))}
    assert bars
    assert {name for name, beyond in bars.items() if beyond and "<script>" not in name} == set()


def test_printing_shows_what_is_folded_and_folds_it_again(opened):
    """Not the lists of runs, which would be a book."""
    opened.run(
        """
        window.printed = null;
        const open = where => [...document.querySelectorAll(where + ' details')].map(block => block.open);
        window.addEventListener('beforeprint', () => {
          window.printed = [open('#claims'), open('section:not(#runs)'), open('#runs')]
        });
        document.querySelector('#runs details').open = true;
        """
    )
    opened.devtools("Page.printToPDF")
    claims, others, runs = opened.run("return window.printed")
    assert claims
    assert all(others)
    assert runs[0]
    assert not any(runs[1:])
    left = "return [...document.querySelectorAll('details')].filter(block => block.open).length"
    assert opened.until(left, 1)


def test_a_link_into_a_closed_block_opens_it(opened, page):
    identity = "figure-accuracy-matrices-toy-buffer-200"
    opened.run(f"location.hash = '#{identity}'")
    assert opened.until(f"return document.getElementById('{identity}').closest('details').open", True)


def test_everything_that_acts_can_be_reached_by_keyboard(opened):
    wanted = opened.run(
        """
        const all = [...document.querySelectorAll('a, button, summary, .scroll, .picture')];
        return all.filter(e => e.tabIndex < 0).length
        """
    )
    assert wanted == 0
