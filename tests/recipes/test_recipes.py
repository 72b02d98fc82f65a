"""Shipped recipes parse, survive a round trip, refuse what they do not know, and run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lightning_longctx._resources import recipes_dir
from lightning_longctx.cli import main
from lightning_longctx.cli.recipes import shipped
from tests.launches import launch_environment
from tests.models.tiny_gguf import write_gguf

WHOLE = sorted(path.name for path in recipes_dir().glob("*.yaml"))
FRAGMENTS = sorted(path.name for path in recipes_dir().glob("fragments/*.yaml"))
# As little of everything as still trains.
SMALL = {
    "quickstart.yaml": ["--model.init_args.decoder.num_layers", "1"],
    "hugging_face.yaml": ["--model.init_args.overrides", "{num_hidden_layers: 1}"],
    "memory_bench.yaml": ["--model.init_args.decoder.num_layers", "2"],
    "plain_module.yaml": ["--model.init_args.num_layers", "1"],
    "smollm2_135m_8k.yaml": [
        "--model.init_args.pretrained=tiny.gguf",
        "--data.init_args.tokenizer.init_args.pretrained=tiny.gguf",
    ],
}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]):
    def print_config(*arguments: str) -> dict:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["fit", *arguments, "--print_config"])
        output = capsys.readouterr()
        assert not ended.value.code, output.err
        return yaml.safe_load(output.out)

    return print_config


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]):
    def error(*arguments: str, command: str = "fit") -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([command, *arguments])
        assert ended.value.code == 2
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1
        return lines[0]

    return error


def test_all_recipes_are_tried() -> None:
    assert set(WHOLE) == set(SMALL)
    assert {path.name for path in shipped()} == {*WHOLE, *FRAGMENTS}


@pytest.mark.parametrize("recipe", WHOLE)
def test_a_printed_config_is_the_same_run(recipe: str, tmp_path: Path, printed) -> None:
    first = printed("--config", recipe)
    (tmp_path / "printed.yaml").write_text(yaml.safe_dump(first))
    assert printed("--config", "printed.yaml") == first
    assert first["trainer"]["strategy"]["class_path"].endswith("LongContextStrategy")


def assert_merged(alone: object, given: object, both: object) -> None:
    """``both`` has what is given, and for the rest what was there."""
    if isinstance(alone, dict) and isinstance(given, dict) and isinstance(both, dict):
        added = {key.removesuffix("+"): value for key, value in given.items() if key.endswith("+")}
        given = {key: value for key, value in given.items() if not key.endswith("+")}
        assert both.keys() == alone.keys() >= given.keys() | added.keys()
        for key, value in alone.items():
            if key in added:
                assert both[key][: len(value)] == value and len(both[key]) == len(value) + len(added[key])
            else:
                assert_merged(value, given.get(key, value), both[key])
    else:
        assert both == given


@pytest.mark.parametrize("fragment", FRAGMENTS)
def test_a_fragment_changes_a_recipe_and_keeps_the_rest(fragment: str, printed) -> None:
    alone, both = printed("--config", "quickstart.yaml"), printed("--config", "quickstart.yaml", "--config", fragment)
    assert both != alone
    given = yaml.safe_load((recipes_dir() / "fragments" / fragment).read_text())
    for section in ("trainer", "model", "data"):
        assert_merged(alone[section], given.get(section, {}), both[section])


def test_communication_and_layouts_survive_a_round_trip(tmp_path: Path, printed) -> None:
    options = {
        "layout": "document_zigzag",
        "communication": {"schedule": "direct", "keep_kv": True, "dtype": "bfloat16", "links": {"outer_gbits": 0.1}},
    }
    strategy = {"class_path": "lightning_longctx.LongContextStrategy", "init_args": options}
    (tmp_path / "given.yaml").write_text(yaml.safe_dump({"trainer": {"strategy": strategy}}))
    first = printed("--config", "quickstart.yaml", "--config", "given.yaml")
    (tmp_path / "printed.yaml").write_text(yaml.safe_dump(first))
    assert printed("--config", "printed.yaml") == first
    found = first["trainer"]["strategy"]["init_args"]
    assert found["layout"] == "document_zigzag" and found["communication"]["links"]["inner_gbits"] == 1600.0
    assert_merged(found["communication"], options["communication"], found["communication"])
    one = "--trainer.strategy.init_args.communication.schedule=all_gather"
    again = printed("--config", "printed.yaml", one)["trainer"]["strategy"]["init_args"]["communication"]
    assert again == found["communication"] | {"schedule": "all_gather"}


@pytest.mark.parametrize("layout", ["auto", "balanced"])
def test_a_layout_on_the_command_line(layout: str, printed) -> None:
    given = printed("--config", "quickstart.yaml", f"--trainer.strategy.init_args.layout={layout}")
    assert given["trainer"]["strategy"]["init_args"]["layout"] == layout


def test_learning_rates_with_an_exponent_are_numbers(printed) -> None:
    def learning_rate(*options: str) -> object:
        return printed("--config", "quickstart.yaml", *options)["model"]["init_args"]["optimizer"]["init_args"]["lr"]

    for text in ("1e-4", "1.0e-4", "0.0001"):
        lr = learning_rate("--model.init_args.optimizer.init_args.lr", text)
        assert isinstance(lr, float) and lr == 1e-4
    assert isinstance(learning_rate(), float)


def test_degrees_on_the_command_line_keep_those_of_the_recipe(printed) -> None:
    given = printed("--config", "quickstart.yaml", "--trainer.strategy.init_args.degrees.inner_ring", "1")
    degrees = given["trainer"]["strategy"]["init_args"]["degrees"]
    kept = {"data": "auto", "context": 4, "head": 1, "tensor": 1, "placement": "head_first"}
    assert degrees == kept | {"inner_ring": 1}


def override(tmp_path: Path, **degrees: object) -> str:
    file = tmp_path / "override.yaml"
    strategy = {"class_path": "lightning_longctx.LongContextStrategy", "init_args": {"degrees": degrees}}
    file.write_text(yaml.safe_dump({"trainer": {"strategy": strategy}}))
    return str(file)


def test_a_number_in_quotes_is_a_number_or_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--config", "quickstart.yaml", "--config", override(tmp_path, context="2"), "--print_config"])
    output = capsys.readouterr()
    if ended.value.code:
        assert "context" in output.err
    else:
        degrees = yaml.safe_load(output.out)["trainer"]["strategy"]["init_args"]["degrees"]
        assert degrees["context"] == 2 and isinstance(degrees["context"], int)


@pytest.mark.parametrize("wrong", [{"context_parallel": 4}, {"inner_rng": 2}])
def test_a_misspelt_degree_is_named(wrong: dict, tmp_path: Path, refused) -> None:
    message = refused("--config", "quickstart.yaml", "--config", override(tmp_path, **wrong))
    assert repr(next(iter(wrong))) in message and "trainer.strategy" in message


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("--trainer.devcs=4", "trainer.devcs"),
        ("--data.init_args.seq_length=8", "seq_length"),
        ("--model.init_args.decoder.widht=8", "widht"),
        ("--trainer.strategy.init_args.degrees.contxt=2", "contxt"),
        ("--trainer.strategy.init_args.layout=zigzak", "layout: Expected"),
        ("--trainer.strategy.init_args.communication.schedule=ring", "schedule: Expected"),
        ("--trainer.strategy.init_args.communication.keepkv=true", "keepkv"),
        ("--data.init_args.packing=best", "packing: Expected"),
    ],
)
def test_an_unknown_option_is_named(option: str, named: str, refused) -> None:
    assert named in refused("--config", "quickstart.yaml", option)


def test_lightnings_optimizer_key_does_not_exist(tmp_path: Path, refused) -> None:
    (tmp_path / "stock.yaml").write_text("optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 1e-3}}")
    message = refused("--config", "quickstart.yaml", "--config", "stock.yaml")
    assert "'optimizer" in message and "model.init_args.optimizer" in message


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--trainer.strategy.init_args.degrees.inner_ring=3"], ["inner_ring=3", "context=4"]),
        (["--trainer.devices=3"], ["context=4", "3 processes", "trainer.devices"]),
        (["--trainer.strategy.init_args.degrees.data=2"], ["data=2", "4 processes"]),
        (["--model.init_args.decoder.num_kv_heads=3"], ["num_kv_heads=3", "num_heads=4"]),
        (["--model.init_args.decoder.windows=[0]"], ["windows=[0]"]),
        (["--trainer.strategy.init_args.communication.links.outer_gbits=0"], ["links.outer_gbits=0"]),
    ],
)
def test_what_does_not_fit_is_named_before_anything_starts(options: list[str], named: list[str], refused) -> None:
    message = refused("--config", "quickstart.yaml", *options)
    assert all(name in message for name in named), message


def command(*arguments: str, torchrun: int = 0, **options) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(torchrun)] if torchrun else []
    return subprocess.run(
        [sys.executable, *launcher, "-m", "lightning_longctx", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env=launch_environment(),
        **options,
    )


@pytest.fixture
def corpus(tmp_path: Path) -> list[str]:
    """Options for a small corpus of the test's own."""
    (tmp_path / "texts").mkdir()
    for name in range(20):
        (tmp_path / "texts" / f"{name}.txt").write_text(f"document {name}: " + "to be or not to be, " * 40)
    options = {"path": tmp_path / "texts", "cache_dir": tmp_path / "cache", "seq_len": 64, "validation_fraction": 0.3}
    return [f"--data.init_args.{name}={value}" for name, value in options.items()]


@pytest.mark.slow
def test_packed_documents_take_a_step(tmp_path: Path, corpus: list[str]) -> None:
    fragments = ["--config", "context2.yaml", "--config", "packed.yaml"]
    done = command("fit", "--config", "quickstart.yaml", *fragments, *ONE_STEP, *corpus)
    assert done.returncode == 0, done.stderr
    assert "train_loss" in done.stdout + done.stderr


ONE_STEP = ["--trainer.max_steps=1", "--trainer.limit_val_batches=1", "--trainer.val_check_interval=1"]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", WHOLE)
def test_a_recipe_takes_a_step(recipe: str, tmp_path: Path, corpus: list[str]) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    done = command("fit", "--config", recipe, *SMALL[recipe], *ONE_STEP, *corpus)
    assert done.returncode == 0, done.stderr
    assert "train_loss" in done.stdout + done.stderr
    (saved,) = (tmp_path / "lightning_logs").rglob("config.yaml")
    assert yaml.safe_load(saved.read_text())["trainer"]["max_steps"] == 1


@pytest.mark.slow
def test_torchrun_takes_a_step(tmp_path: Path, corpus: list[str]) -> None:
    done = command("fit", "--config", "plain_module.yaml", *SMALL["plain_module.yaml"], *ONE_STEP, *corpus, torchrun=2)
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "lightning_logs").rglob("events*"))


@pytest.mark.exhaustive
def test_torchrun_with_other_processes_than_devices_is_refused(corpus: list[str]) -> None:
    done = command("fit", "--config", "quickstart.yaml", *ONE_STEP, *corpus, torchrun=2)
    assert done.returncode != 0
    # Every rank says so, unless torchrun, whose own traceback this is, ends it first.
    assert "error: trainer.devices=4" in done.stderr
    assert done.stderr.count("Traceback") == 1 and "ChildFailedError" in done.stderr


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_the_last_checkpoint_of_a_new_run_is_refused(refused, command: str) -> None:
    """Lightning would find none, warn, and score the initial weights."""
    options = ("--config", "quickstart.yaml", "--config", "one_process.yaml", "--ckpt_path", "last")
    assert f"ckpt_path=last means nothing to {command}" in refused(*options, command=command)
