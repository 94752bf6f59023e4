from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.analysis.comparisons import comparisons, variants
from holdfast.report.charts import comparison_charts
from report.conftest import make, run, square


def test_variants_gather_seeds_and_keep_the_papers_order():
    found = variants([run("mse", seed=1), run("zeta"), run("er"), run("mse", seed=0), run("sgd")])
    assert [variant.label for variant in found] == ["sgd", "er", "mse", "zeta"]
    assert [result.config.seed for result in found[2].results] == [0, 1]


def test_namesakes_are_told_apart_by_what_differs_and_nothing_else():
    found = variants(
        [run("er", lr=0.1), run("er", lr=0.2), run("l2", lr=0.2, options=(("p", 3.0),)), run("l2", lr=0.2)]
    )
    assert [variant.label for variant in found] == ["er, lr 0.1", "er, lr 0.2", "l2, p=3", "l2"]


def test_what_is_usual_among_namesakes_goes_without_saying():
    """Each told every setting in which any two differed, usual values included."""
    results = [run("er"), run("er", replay_size=7), run("er", lr=0.001, optimizer="adam")]
    expected = {"er", "er, replay size 7", "er, lr 0.001, optimizer adam"}
    for order in permutations(results):
        assert {variant.label for variant in variants(order)} == expected
    assert [variant.label for variant in variants(run("er", lr=lr) for lr in (0.3, 0.1, 0.2))] == [
        "er, lr 0.1",
        "er, lr 0.2",
        "er, lr 0.3",
    ]


VARIED = {
    "lr": st.sampled_from([0.1, 0.12345678, 0.12345679]),
    "optimizer": st.sampled_from(["sgd", "adam"]),
    "tasks": st.sampled_from([None, 3]),
    "options": st.sampled_from([(), (("p", 3.0),), (("lr", 4.0),)]),
    "settings": st.sampled_from([(), (("turn", 1.0),), (("turn", 2.0), ("hold", "all"))]),
}


@settings(deadline=None)
@given(st.lists(st.fixed_dictionaries(VARIED), min_size=1, max_size=12))
def test_no_two_configs_share_a_label_whatever_their_order(several):
    results = [run("er").config.change(**varied) for varied in several]
    found, again = (
        {variant.config: variant.label for variant in variants(make(config, square(80.0)) for config in order)}
        for order in (results, reversed(results))
    )
    assert len(set(found.values())) == len(set(results))
    assert found == again


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


def test_titles_leave_out_what_is_not_in_use_and_count_the_tasks_of_the_stream():
    """They said "None tasks", "1 tasks", "train limit None" and "validation 0.0"."""
    own = make(run("er").config.change(tasks=None), square(80.0))  # the benchmark's own, which are three as well
    results = [run("er"), own, run("er", tasks=1), run("er", train_limit=200), run("er", validation=0.1)]
    found = {each.title: [variant.label for variant in each.variants] for each in comparisons(results)}
    assert found == {
        "toy, 1 task, buffer 200": ["er"],
        "toy, 3 tasks, buffer 200": ["er", "er, tasks 3"],
        "toy, 3 tasks, train limit 200, buffer 200": ["er"],
        "toy, 3 tasks, validation 0.1, buffer 200": ["er"],
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
