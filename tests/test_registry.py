import pytest

from holdfast.errors import HoldfastError, UsageError
from holdfast.registry import Registry, unknown_name


@pytest.fixture
def tools():
    registry: Registry[object] = Registry("tool")

    @registry.register("hammer")
    def hammer():
        """Drives nails.

        Not screws.
        """

    registry.register("saw", "cuts wood")(42)
    return registry


def test_registered_things_are_found_in_order_of_registration(tools):
    assert list(tools) == ["hammer", "saw"]
    assert len(tools) == 2
    assert tools["saw"] == 42
    assert dict(tools) == {"hammer": tools["hammer"], "saw": 42}
    assert list(tools.items())[1] == ("saw", 42)


def test_register_returns_what_it_was_given(tools):
    thing = object()
    assert tools.register("thing", "a thing")(thing) is thing


def test_description_is_given_or_the_first_line_of_the_docstring(tools):
    assert tools.describe("hammer") == "Drives nails."
    assert tools.describe("saw") == "cuts wood"


def test_a_thing_without_docstring_has_an_empty_description(tools):
    tools.register("nameless")(lambda: None)
    assert tools.describe("nameless") == ""


def test_duplicate_name_raises_and_keeps_the_first(tools):
    with pytest.raises(UsageError, match="tool 'saw' is registered already"):
        tools.register("saw", "another")(43)
    assert tools["saw"] == 42
    assert tools.describe("saw") == "cuts wood"


def test_it_is_known_which_module_registered_a_thing(tools):
    tools.register("sorted", "from elsewhere")(sorted)
    assert tools.origin("sorted") == __name__
    assert tools.origin("of nobody") is None


@pytest.mark.parametrize("look_up", [lambda t: t["hamer"], lambda t: t.describe("hamer")])
def test_unknown_name_names_the_nearest(tools, look_up):
    with pytest.raises(UsageError, match="unknown tool 'hamer': did you mean 'hammer'"):
        look_up(tools)


def test_unknown_name_far_from_all_lists_them(tools):
    with pytest.raises(UsageError, match="unknown tool 'xyz': known: hammer, saw"):
        tools["xyz"]


def test_membership_and_get_do_not_raise(tools):
    assert "saw" in tools
    assert "hamer" not in tools
    assert 42 not in tools
    assert tools.get("hamer") is None
    assert tools.get("hamer", 7) == 7
    assert tools.get("saw") == 42


def test_it_cannot_be_written_to_like_a_dict(tools):
    with pytest.raises(TypeError):
        tools["saw"] = 1
    with pytest.raises(TypeError):
        del tools["saw"]


def test_the_error_is_for_people_and_for_programs():
    error = unknown_name("setting", "lrr", ["lr", "alpha"])
    assert isinstance(error, HoldfastError)
    assert isinstance(error, ValueError)
    assert error.exit_code == 2
    assert str(error) == "unknown setting 'lrr': did you mean 'lr'?"


def define(kind):
    """What a cell of a notebook does, each time it is run."""

    def made():
        return kind

    made.__qualname__, made.__module__ = "chisel", "__main__"
    return made


def test_what_is_defined_anew_takes_its_own_place(tools):
    tools.register("chisel", "old")(define("old"))
    tools.register("chisel", "new")(define("new"))
    assert tools["chisel"]() == "new"
    assert tools.describe("chisel") == "new"
    with pytest.raises(UsageError, match="registered already"):
        tools.register("chisel")(len)  # somebody else's
    tools.register("plane")(lambda: 0)
    with pytest.raises(UsageError, match="registered already"):
        tools.register("plane")(lambda: 1)  # all lambdas are called alike


def test_registries_side_by_side_share_their_names(tools):
    machines = Registry("machine", beside=tools)
    tools.register("chisel")(1)
    machines.register("lathe")(2)
    with pytest.raises(UsageError, match="tool 'chisel' already; choose another name for the machine"):
        machines.register("chisel")(3)
    with pytest.raises(UsageError, match="there is a machine 'lathe' already"):
        tools.register("lathe")(4)
    assert (list(tools), list(machines)) == (["hammer", "saw", "chisel"], ["lathe"])


def test_what_is_defined_anew_beside_another_registry(tools):
    machines = Registry("machine", beside=tools)
    tools.register("chisel")(define("old"))
    tools.register("chisel")(define("new"))
    with pytest.raises(UsageError, match="there is a tool 'chisel'"):
        machines.register("chisel")(define("new"))
    assert tools["chisel"]() == "new"
