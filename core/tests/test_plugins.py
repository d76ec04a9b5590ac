"""The plugin catalog: discovery, imports, and errors about plugins that cannot be loaded."""

import logging
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from fake_site import Site, installed
from graphpact.errors import (
    AmbiguousPluginError,
    ConfigError,
    RejectedPluginError,
    UnknownPluginError,
)
from graphpact.plugins import (
    DISABLE_VARIABLE,
    KINDS,
    Loaded,
    Plugin,
    PluginCatalog,
    Rejected,
)

ROOT = Path(__file__).parents[2]
PROJECTS = sorted([p for w in ("*", "plugins/*", "integrations/*") for p in ROOT.glob(f"{w}/pyproject.toml")])

GOOD = """
    from graphpact.graphs import GraphDriver
    from graphpact.hookspecs import hookimpl
    from graphpact.runners import GraphRunner

    def concrete(base):
        stubs = {name: lambda self, *args: None for name in base.__abstractmethods__}
        constants = dict.fromkeys(base.__annotations__)
        return type("Good", (base,), {**stubs, **constants})

    Runner = concrete(GraphRunner)
    Driver = concrete(GraphDriver)
"""


def driver(name: str) -> str:
    """Return the source of a graph driver of that name."""
    return GOOD + f"    Driver.name = {name!r}\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Return an empty site on ``sys.path``."""
    with installed(tmp_path / "site", monkeypatch) as made:
        yield made


def outcomes(catalog: PluginCatalog) -> dict[str, Plugin]:
    """Return the checked fake plugins by name."""
    plugins = [catalog.load(info) for kind in KINDS for info in catalog.infos(kind)]
    return {p.info.name: p for p in plugins if p.info.distribution.startswith("fake-")}


def reason(plugin: Plugin) -> str:
    """Return why a plugin was rejected."""
    assert isinstance(plugin, Rejected)
    return plugin.reason


def test_scanning_imports_nothing_and_selecting_imports_one(site: Site) -> None:
    """A scan reads metadata only; selecting a plugin imports its module and no other."""
    one = site.add("one", GOOD, offers={"fake_one": "Runner"})
    two = site.add("two", GOOD, offers={"fake_two": "Runner"})
    catalog = PluginCatalog.scan()
    assert {"fake_one", "fake_two"} <= {info.name for info in catalog.infos("runner")}
    assert not {one, two} & sys.modules.keys()

    cls = catalog.select("runner", "fake_one")
    assert cls is sys.modules[one].Runner
    assert two not in sys.modules


def test_what_the_metadata_says_is_in_the_info(site: Site) -> None:
    """An info names kind, name, distribution, version, target and contract as installed."""
    site.add(
        "one",
        driver("fake_one"),
        offers={"fake_one": "Driver"},
        group="graphpact.graph_drivers",
        version="3.4",
    )
    info = outcomes(PluginCatalog.scan())["fake_one"].info
    assert (info.kind, info.name, info.version) == ("graph_driver", "fake_one", "3.4")
    assert (info.distribution, info.target, info.contract) == ("fake-one", "fake_one:Driver", "1")


def test_a_driver_has_the_name_of_its_entry_point(site: Site) -> None:
    """A driver whose `name` differs is rejected, because reports would show the name of another driver."""
    site.add("one", driver("tape"), offers={"fake_one": "Driver"}, group="graphpact.graph_drivers")
    said = reason(outcomes(PluginCatalog.scan())["fake_one"])
    assert said == "Good.name is 'tape'; reports would show the name of another driver"


@pytest.mark.parametrize(
    ("group", "near"),
    [
        ("graphpact.graph_driver", "graphpact.graph_drivers"),
        ("graphpact.grph_drivers", "graphpact.graph_drivers"),
        ("graphpact.command", "graphpact.commands"),
        ("graphpact.attention_backend", "graphpact.attention_backends"),
        ("graphpact.adapters", None),
        ("graphpact.speculation", None),
        ("console_scripts", None),
    ],
)
def test_a_misspelt_group_is_reported(
    site: Site, caplog: pytest.LogCaptureFixture, group: str, near: str | None
) -> None:
    """For a plugin in an unknown group the log suggests the nearest group; unrelated groups are ignored."""
    site.add("one", GOOD, offers={"fake_one": "Runner"}, group=group)
    with caplog.at_level(logging.WARNING, "graphpact.plugins"):
        PluginCatalog.scan()
    told = [] if near is None else [f"fake-one: entry points in {group!r}; did you mean {near!r}?"]
    assert caplog.messages == told


@pytest.mark.parametrize(
    ("contract", "says"),
    [
        (None, "fake-old declares no contract version"),
        ("two", "contract version 'two' is not an integer"),
        ("2", "written for contract version 2; this graphpact has version 1"),
        ("1" * 5000, "is not an integer below 10**9"),
        ("-1", "contract version '-1' is not an integer"),
        ("²", "contract version '²' is not an integer"),
    ],
)
def test_another_contract_is_refused_before_import(
    site: Site, tmp_path: Path, contract: str | None, says: str
) -> None:
    """A plugin of another contract version is rejected from its metadata: its module never runs."""
    footprint = tmp_path / "imported"
    source = f"open({str(footprint)!r}, 'w').close()\n" + textwrap.dedent(GOOD)
    site.add("old", source, offers={"fake_old": "Runner"}, contract=contract)
    catalog = PluginCatalog.scan()
    assert says in reason(outcomes(catalog)["fake_old"])
    with pytest.raises(RejectedPluginError, match="was rejected"):
        catalog.select("runner", "fake_old")
    assert not footprint.exists()
    assert "fake_old" not in sys.modules


# Plugins that are broken although their metadata is valid, each with a part of the reason for rejecting it.
BROKEN = {
    "imports_missing": ("import fake_absent", "raised ModuleNotFoundError: No module named"),
    "syntax": ("def", "raised SyntaxError: invalid syntax (fake_syntax.py, line 1)"),
    "exits": ("import sys; sys.exit(7)", "raised SystemExit: 7"),
    "panics": (
        "class Panic(BaseException): pass\nraise Panic('a Rust extension')",
        "raised Panic: a Rust extension",
    ),
    "mute": (
        "class Mute(Exception):\n    def __str__(self): raise ValueError\nraise Mute",
        "raised Mute: (its message cannot be read)",
    ),
    "no_attribute": ("", "raised AttributeError: module 'fake_no_attribute' has no attribute"),
    "not_a_class": ("def Runner(): pass", "refers to a function, not to a class derived from"),
    "not_derived": ("class Runner: pass", "refers to a class Runner, not to a class derived from"),
    "wrong_kind": (GOOD + "    Runner = Driver", "not to a class derived from graphpact.runners"),
    "abstract": (
        "from graphpact.runners import GraphRunner\nclass Runner(GraphRunner): modes = frozenset()",
        "Runner is abstract: it lacks shapes",
    ),
    "no_modes": (GOOD + "    del Runner.modes", "Good does not set modes"),
    "misspelt": (
        GOOD + "    Runner.populte = hookimpl(lambda self, registry, batch, shape: None)",
        "Good implements an unknown hook 'populte'; did you mean 'populate'",
    ),
    "arguments": (
        GOOD + "    Runner.populate = hookimpl(lambda self, registry, batch, shp: None)",
        "Argument(s) {'shp'} are declared in the hookimpl but can not be found in the hookspec",
    ),
    "unmarked": (
        GOOD + "    Runner = type('Other', (Runner,), {'populate': lambda self, registry, shp: None})",
        "Argument(s) {'shp'} are declared in the hookimpl but can not be found in the hookspec",
    ),
    "two_arguments": (
        GOOD + "    Runner.__init__ = lambda self, context, width: None",
        "Good cannot be built with context: missing a required argument: 'width'",
    ),
    "no_arguments": (GOOD + "    Runner.__init__ = lambda self: None", "too many positional arguments"),
    "hostile": (
        """
        class Meta(type):
            def __subclasscheck__(cls, other): raise RuntimeError
            def __getattribute__(cls, name): raise RuntimeError(name)
        class Runner(metaclass=Meta): pass
        """,
        "checking fake_hostile:Runner raised",
    ),
}


def test_every_broken_plugin_is_rejected_beside_a_good_one(site: Site) -> None:
    """Each broken plugin is rejected with its own reason; none prevents the good plugin from loading."""
    site.add("good", GOOD, offers={"fake_good": "Runner"})
    for name, (source, _) in BROKEN.items():
        site.add(name, source, offers={f"fake_{name}": "Runner"})
    catalog = PluginCatalog.scan()
    found = outcomes(catalog)
    assert isinstance(found.pop("fake_good"), Loaded)
    for name, (_, says) in BROKEN.items():
        assert says in reason(found.pop(f"fake_{name}"))
    assert not found

    with pytest.raises(RejectedPluginError) as refused:
        catalog.select("runner", "fake_misspelt")
    assert "runner fake_misspelt (fake-misspelt 1.0) was rejected" in str(refused.value)
    assert "did you mean 'populate'" in str(refused.value)


def test_an_observer_is_built_without_arguments(site: Site) -> None:
    """An observer whose constructor requires arguments is rejected by name; defaults are allowed."""
    source = (
        GOOD
        + """
    class Observer:
        def __init__(self, rate, *, file=None): pass

        @hookimpl(wrapper=True)
        def run_step(self): return (yield)

    class Right(Observer):
        def __init__(self, rate=1): pass
    """
    )
    offers = {"fake_needy": "Observer", "fake_right": "Right"}
    site.add("one", source, offers=offers, group="graphpact.observers")
    assert isinstance(PluginCatalog.scan().select("observer", "fake_right"), type)
    with pytest.raises(RejectedPluginError) as refused:
        PluginCatalog.scan().select("observer", "fake_needy")
    assert refused.value.message == (
        "observer fake_needy (fake-one 1.0) was rejected: Observer cannot be built with no argument:"
        " missing a required argument: 'rate'"
    )


def test_a_hook_may_be_a_function_from_elsewhere(site: Site) -> None:
    """A hook may be defined outside the class, call its instance ``this``, or be a static method."""
    source = (
        GOOD
        + """
    @hookimpl
    def shared(self, registry, batch, shape): pass

    class Runner(Runner):
        populate = shared

        @hookimpl
        def prepare_replay(this, registry, shape): pass

        @staticmethod
        @hookimpl(wrapper=True)
        def init_metadata_replay(view):
            return (yield)
    """
    )
    site.add("one", source, offers={"fake_one": "Runner"})
    assert isinstance(outcomes(PluginCatalog.scan())["fake_one"], Loaded)


def test_a_crash_names_the_switch_that_avoids_it(site: Site) -> None:
    """The reason of a crash names the variable that disables the plugin, and the variable works."""
    module = site.add("exits", "raise SystemExit(7)", offers={"fake_exits": "Runner"})
    switch = f"{DISABLE_VARIABLE}=runner:fake_exits"
    assert switch in reason(outcomes(PluginCatalog.scan())["fake_exits"])
    variable, _, value = switch.partition("=")
    catalog = PluginCatalog.scan(env={variable: value})
    assert reason(outcomes(catalog)["fake_exits"]) == f"disabled by {DISABLE_VARIABLE}"
    assert module not in sys.modules


def test_an_adapter_beside_an_engine_says_what_only_a_check_needs(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where graphpact-adapters is not installed, as beside an engine, the reason sounds of no defect."""
    monkeypatch.setitem(sys.modules, "graphpact_adapters", None)
    site.add(
        "acme", "import graphpact_adapters\nimport nowhere", offers={"acme": "it"}, group="graphpact.adapters"
    )
    site.add("beta", "import nowhere", offers={"beta": "it"}, group="graphpact.adapters")
    found = outcomes(PluginCatalog.scan())
    assert reason(found["acme"]) == "only `graphpact check` uses it, and needs graphpact-adapters for it"
    assert "No module named 'nowhere'" in reason(found["beta"])


def test_a_keyboard_interrupt_is_not_swallowed(site: Site) -> None:
    """Ctrl-C during an import is raised, and is not taken for a broken plugin."""
    site.add("slow", "raise KeyboardInterrupt", offers={"fake_slow": "Runner"})
    catalog = PluginCatalog.scan()
    with pytest.raises(KeyboardInterrupt):
        catalog.select("runner", "fake_slow")


@pytest.mark.parametrize("entry", ["fake_one", "runner:fake_one", " fake_one , fake_one"])
def test_a_disabled_plugin_is_rejected_without_import(site: Site, entry: str) -> None:
    """A plugin that the variable names, with or without its kind, is rejected without an import."""
    module = site.add("one", GOOD, offers={"fake_one": "Runner", "fake_two": "Runner"})
    catalog = PluginCatalog.scan(env={DISABLE_VARIABLE: entry})
    with pytest.raises(RejectedPluginError, match=f"disabled by {DISABLE_VARIABLE}"):
        catalog.select("runner", "fake_one")
    assert module not in sys.modules
    assert isinstance(outcomes(catalog)["fake_two"], Loaded)


@pytest.mark.parametrize(
    ("entry", "hint"),
    [
        ("fake_onne", "did you mean 'fake_one'?"),
        ("runner:fake_onne", "did you mean 'runner:fake_one'?"),
        ("graph_driver:fake_one", "did you mean 'graph_driver:"),
        ("x:y:z", "unset it, or name some of: "),
    ],
)
def test_disabling_what_is_not_there_is_an_error(
    site: Site, monkeypatch: pytest.MonkeyPatch, entry: str, hint: str
) -> None:
    """An entry of the variable that matches no installed plugin is an error with the nearest name.

    If no name is near, the hint lists the installed ones.
    """
    site.add("one", GOOD, offers={"fake_one": "Runner"})
    monkeypatch.setenv(DISABLE_VARIABLE, entry)
    with pytest.raises(ConfigError, match=f"{entry!r} matches no installed plugin") as refused:
        PluginCatalog.scan()
    assert str(refused.value.hint).startswith(hint)
    if entry == "x:y:z":
        assert "fake_one" in str(refused.value.hint)


def test_two_distributions_with_one_name_are_both_refused(site: Site) -> None:
    """A name that two distributions offer is an error that names both, and neither is imported."""
    site.add("one", GOOD, offers={"fake_twin": "Runner"}, version="1.5")
    site.add("two", GOOD, offers={"fake_twin": "Runner", "fake_only": "Runner"}, version="2.5")
    catalog = PluginCatalog.scan()
    twins = [catalog.load(i) for i in catalog.infos("runner") if i.name == "fake_twin"]
    assert [p.info.distribution for p in twins] == ["fake-one", "fake-two"]
    with pytest.raises(AmbiguousPluginError) as refused:
        catalog.select("runner", "fake_twin")
    for text in (str(refused.value), *map(reason, twins)):
        assert "fake-one 1.5" in text
        assert "fake-two 2.5" in text
    assert "fake_one" not in sys.modules
    assert catalog.select("runner", "fake_only") is sys.modules["fake_two"].Runner


def test_one_name_in_two_kinds_is_not_ambiguous(site: Site) -> None:
    """Names are unique within a kind: a runner and a driver may share one."""
    site.add("one", GOOD, offers={"fake_name": "Runner"})
    site.add("two", driver("fake_name"), offers={"fake_name": "Driver"}, group="graphpact.graph_drivers")
    catalog = PluginCatalog.scan()
    assert catalog.select("runner", "fake_name") is sys.modules["fake_one"].Runner
    assert catalog.select("graph_driver", "fake_name") is sys.modules["fake_two"].Driver


def test_a_distribution_that_is_installed_twice_counts_once(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older copy of a distribution further down the path is not a second distribution."""
    Site(tmp_path / "below").add("one", GOOD, offers={"fake_one": "Runner"}, version="0.9")
    egg = site.root / "fake_one.egg-info"
    egg.mkdir()
    site.add("one", GOOD, offers={"fake_one": "Runner"})
    for file in (site.root / "fake_one-1.0.dist-info").iterdir():
        name = "PKG-INFO" if file.name == "METADATA" else file.name
        (egg / name).write_text(file.read_text())
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "below")])
    catalog = PluginCatalog.scan()
    infos = [info for info in catalog.infos("runner") if info.name == "fake_one"]
    assert [info.version for info in infos] == ["1.0"]
    assert catalog.select("runner", "fake_one") is sys.modules["fake_one"].Runner


def test_a_plugin_is_loaded_once(site: Site) -> None:
    """Checking and selecting again gives the same class and does not import again."""
    site.add("one", GOOD, offers={"fake_one": "Runner"})
    catalog = PluginCatalog.scan()
    cls = catalog.select("runner", "fake_one")
    del sys.modules["fake_one"]
    assert catalog.select("runner", "fake_one") is cls
    assert Loaded(outcomes(catalog)["fake_one"].info, cls) == outcomes(catalog)["fake_one"]
    assert "fake_one" not in sys.modules


def test_a_catalog_is_sorted_by_kind_and_name(site: Site) -> None:
    """The plugins of a catalog are sorted by kind, then by name."""
    site.add("b", GOOD, offers={"fake_z": "Runner", "fake_a": "Runner"})
    site.add("a", driver("fake_m"), offers={"fake_m": "Driver"}, group="graphpact.graph_drivers")
    catalog = PluginCatalog.scan()
    names = [(info.kind, info.name) for info in catalog.infos()]
    assert names == sorted(names)
    assert set(outcomes(catalog)) == {"fake_z", "fake_a", "fake_m"}


@pytest.mark.parametrize("damage", ["[graphpact.runners]\nno equals sign", "\udcff", "no version"])
def test_unreadable_metadata_is_left_out_with_a_warning(
    site: Site, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    """A distribution whose metadata cannot be read is logged and does not end the scan."""
    site.add("good", GOOD, offers={"fake_good": "Runner"})
    site.add("torn", GOOD, offers={"fake_torn": "Runner"})
    info = site.root / "fake_torn-1.0.dist-info"
    if damage == "no version":
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-torn\n")
    else:
        (info / "entry_points.txt").write_bytes(damage.encode(errors="surrogateescape"))
    with caplog.at_level(logging.WARNING, "graphpact.plugins"):
        found = outcomes(PluginCatalog.scan())
    assert "metadata cannot be read" in caplog.text
    assert set(found) == {"fake_good"}


def test_an_unknown_name_says_what_is_there_and_what_was_refused(site: Site) -> None:
    """The error has the name, the available and the rejected plugins with reasons, and the nearest name."""
    site.add("one", GOOD, offers={"fake_decode": "Runner"}, version="1.5")
    site.add("old", GOOD, offers={"fake_elder": "Runner"}, contract="0")
    site.add("drv", driver("fake_decoed"), offers={"fake_decoed": "Driver"}, group="graphpact.graph_drivers")
    with pytest.raises(UnknownPluginError) as refused:
        PluginCatalog.scan().select("runner", "fake_decoed")
    text = str(refused.value)
    assert text.startswith("no runner is called 'fake_decoed'\n  available: ")
    assert "fake_decode (fake-one 1.5)" in text
    assert "\n  rejected: fake_elder (fake-old 1.0): written for contract version 0" in text
    assert "\n  note: fake_decoed (fake-drv 1.0) is a graph_driver" in text
    assert text.endswith("\n  help: did you mean 'fake_decode'?")
    assert not {"fake_one", "fake_old", "fake_drv"} & sys.modules.keys()


def test_a_kind_that_does_not_exist_is_an_unknown_plugin() -> None:
    """An unknown kind raises UnknownPluginError, not KeyError."""
    with pytest.raises(UnknownPluginError, match="no sampler is called 'greedy'"):
        PluginCatalog({}).select("sampler", "greedy")  # type: ignore[call-overload]


def test_an_unknown_name_is_in_the_error() -> None:
    """The error has the requested kind and name, so that a command can add help."""
    with pytest.raises(UnknownPluginError) as refused:
        PluginCatalog({}).select("attention_backend", "flash_infer")
    assert (refused.value.kind, refused.value.name) == ("attention_backend", "flash_infer")
    assert refused.value.hint == "`graphpact plugins` lists what is installed"


def test_our_own_distributions_pass_the_same_door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every plugin that a pyproject.toml of this repository declares is found and loads."""
    declared = set()
    for file in PROJECTS:
        project = tomllib.loads(file.read_text())["project"]
        info = tmp_path / f"{project['name'].replace('-', '_')}-0.1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0.1.0\n")
        lines = []
        for group, offers in project.get("entry-points", {}).items():
            lines += [f"[{group}]", *(f"{name} = {target}" for name, target in offers.items())]
            declared |= (
                set(offers) if group.startswith("graphpact.") and group != "graphpact.contract" else set()
            )
        (info / "entry_points.txt").write_text("\n".join(lines))
        monkeypatch.syspath_prepend(str(file.parent))
    monkeypatch.syspath_prepend(str(tmp_path))
    catalog = PluginCatalog.scan(env={})
    ours = [catalog.load(i) for i in catalog.infos() if i.distribution.startswith("graphp")]
    assert {p.info.name for p in ours} == declared
    assert [p for p in ours if isinstance(p, Rejected)] == []


def test_importing_the_module_imports_no_plugin() -> None:
    """``import graphpact.plugins`` loads no plugin package, and neither torch nor transformers."""
    script = (
        "import sys, graphpact.plugins;"
        "print([m for m in sys.modules if m.startswith(('graphpact_', 'torch', 'transformers'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT / "core",
    )
    assert done.stdout.strip() == "[]"


def test_a_folder_named_otherwise_is_found_all_the_same(site: Site) -> None:
    """A distribution whose metadata folder has an unusual name is found like any other."""
    site.add("odd", GOOD, offers={"fake_odd": "Runner"})
    (site.root / "fake_odd-1.0.dist-info").rename(site.root / "fake-odd-1.0.dist-info")
    assert isinstance(outcomes(PluginCatalog.scan())["fake_odd"], Loaded)


def test_an_engine_offers_all_that_commands_use(site: Site) -> None:
    """A class that lacks a method of `EngineOffer`, or the engine's name, is rejected; a whole one loads."""
    head = "from graphpact.engines import EngineOffer\nclass {}(EngineOffer):\n    name = 'Acme'\n"
    unavailable = "    def unavailable(self):\n        return None\n"
    code = head.format("Whole") + unavailable + head.format("Half")
    site.add("one", code, offers={"whole": "Whole", "half": "Half"}, group="graphpact.engines")
    found = outcomes(PluginCatalog.scan())
    assert isinstance(found["whole"], Loaded)
    assert reason(found["half"]) == "Half is abstract: it lacks unavailable"
