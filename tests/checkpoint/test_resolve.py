"""Names of models: paths, names in a Hugging Face cache, and errors that say where a model was looked for."""

from pathlib import Path

import pytest

from dsjax.checkpoint.resolve import hub_cache, model_name, resolve_model
from dsjax.errors import CheckpointError

NAME, COMMIT = "deepseek-ai/DeepSeek-V2-Lite", "604d5664dddd88a0433dbae533b7fe9472482de0"


def add_model(cache: Path, name: str = NAME, config: bool = True) -> Path:
    """A model in a cache as the Hub's tools lay it out, with an older commit beside the current one; its folder."""
    repository = cache / f"models--{name.replace('/', '--')}"
    for commit in ("0000000", COMMIT):
        (repository / "snapshots" / commit).mkdir(parents=True)
        blob = repository / "blobs" / commit
        blob.parent.mkdir(exist_ok=True)
        blob.write_text("{}")
        if config:
            (repository / "snapshots" / commit / "config.json").symlink_to(blob)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return repository


@pytest.fixture(autouse=True)
def no_cache_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.mark.parametrize(
    ("variables", "cache"),
    [
        ({}, "home/.cache/huggingface/hub"),
        ({"XDG_CACHE_HOME": "xdg"}, "xdg/huggingface/hub"),
        ({"XDG_CACHE_HOME": "xdg", "HF_HOME": "hf"}, "hf/hub"),
        ({"XDG_CACHE_HOME": "xdg", "HF_HOME": "hf", "HF_HUB_CACHE": "hub"}, "hub"),
    ],
)
def test_a_name_is_found_in_the_cache(monkeypatch, tmp_path: Path, variables: dict[str, str], cache: str):
    for name, folder in variables.items():
        monkeypatch.setenv(name, str(tmp_path / folder))
    repository = add_model(tmp_path / cache)
    assert hub_cache() == tmp_path / cache
    folder = resolve_model(NAME)
    assert folder == repository / "snapshots" / COMMIT
    assert model_name(folder) == NAME


def test_the_folder_of_a_model_in_any_cache(tmp_path: Path):
    repository = add_model(tmp_path / "elsewhere")
    assert resolve_model(repository) == repository / "snapshots" / COMMIT
    older = repository / "snapshots" / "0000000"
    assert resolve_model(older) == older


def test_a_path_goes_before_a_name(monkeypatch, tmp_path: Path):
    add_model(hub_cache())
    monkeypatch.chdir(tmp_path)
    Path(NAME).mkdir(parents=True)
    (Path(NAME) / "config.json").write_text("{}")
    assert resolve_model(NAME) == Path(NAME)
    assert model_name(resolve_model(NAME)) == "DeepSeek-V2-Lite"


def test_the_error_says_where_a_model_was_looked_for(tmp_path: Path):
    with pytest.raises(CheckpointError) as error:
        resolve_model(NAME)
    assert f"no model at {NAME}, nor in the Hugging Face cache at {tmp_path}/home/.cache" in str(error.value)
    assert "models--deepseek-ai--DeepSeek-V2-Lite" in str(error.value)
    with pytest.raises(CheckpointError, match=r"There is no model at /no/such/folder\. Give the path"):
        resolve_model("/no/such/folder")


def test_a_model_that_is_not_complete(tmp_path: Path):
    repository = add_model(hub_cache(), config=False)
    with pytest.raises(CheckpointError, match=f"{COMMIT} has no config.json: download the model again"):
        resolve_model(NAME)
    (repository / "refs" / "main").unlink()
    with pytest.raises(CheckpointError, match="main branch was not downloaded; give the path of one of its snapshots"):
        resolve_model(NAME)


def test_demo_and_folders(tmp_path: Path):
    assert (resolve_model("demo") / "tokenizer.json").exists()
    assert model_name(resolve_model("demo")) == "demo"
    with pytest.raises(CheckpointError, match=r"has no config\.json, so it is not a checkpoint folder"):
        resolve_model(tmp_path)


@pytest.mark.parametrize("model", [None, 5, b"demo", ["demo"], "x" * 5000, "~nobody-of-this-name/model"], ids=repr)
def test_what_is_no_name(model):
    with pytest.raises(CheckpointError, match="The model"):
        resolve_model(model)
