from holdfast.analysis.comparisons import comparisons, variants
from holdfast.report.charts import comparison_charts
from report.conftest import run


def test_variants_gather_seeds_and_keep_the_papers_order():
    found = variants([run("mse", seed=1), run("zeta"), run("er"), run("mse", seed=0), run("sgd")])
    assert [variant.label for variant in found] == ["sgd", "er", "mse", "zeta"]
    assert [result.config.seed for result in found[2].results] == [0, 1]


def test_namesakes_are_told_apart_by_what_differs_and_nothing_else():
    found = variants(
        [run("er", lr=0.1), run("er", lr=0.2), run("l2", lr=0.2, options=(("p", 3.0),)), run("l2", lr=0.2)]
    )
    assert [variant.label for variant in found] == ["er, lr 0.1", "er, lr 0.2", "l2, p=3", "l2"]


def test_of_a_method_s_own_settings_only_those_that_differ_are_told():
    usual = (("adjusted", True), ("target", "stored"))
    found = variants([run("ballast", settings=more) for more in (usual, (*usual, ("turn", 1.0)), usual[:1])])
    assert {variant.label for variant in found} == {
        "ballast",
        "ballast, target=stored",
        "ballast, target=stored, turn=1",
    }


def test_comparisons_part_buffers_and_settings_and_share_methods_without_a_buffer():
    results = [run("er"), run("er", buffer_size=500), run("sgd"), run("er", tasks=5)]
    found = {
        comparison.title: [variant.label for variant in comparison.variants] for comparison in comparisons(results)
    }
    assert found == {
        "toy, 3 tasks, buffer 200": ["sgd", "er"],
        "toy, 3 tasks, buffer 500": ["sgd", "er"],
        "toy, 5 tasks, buffer 200": ["er"],
    }


def test_methods_without_a_buffer_alone_make_a_comparison():
    (comparison,) = comparisons([run("joint"), run("sgd")])
    assert comparison.title == "toy, no buffer"


def test_many_variants_are_one_comparison_of_which_a_figure_names_a_few():
    many = [run("mi", 60 + beta, beta=beta / 10) for beta in range(20)]
    (comparison,) = comparisons([*many, run("er")])
    assert len(comparison.variants) == 21
    figure = comparison_charts(comparison)[0].draw()
    assert "er" in (named := {text.get_text() for text in figure.axes[0].texts})
    assert len(named) == 6
