"""Bad input: code 2, one line that names the culprit, no traceback, nothing written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from commands import TINY, Captured, cli, empty_place, images, ok, save_npz
from wardround.models import NetSpec, fresh


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield from empty_place(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that may be wrong with a file."""
    folder = tmp_path_factory.mktemp("files")
    texts = {
        "broken.toml": "rounds = = 3",
        "unknown.toml": "[train]\nlearning_rat = 3",
        "toplevel.json": "[1]",
        "set.toml": "set = 5",
        "set-fedprox.toml": "[set]\nfedprox = 3",
        "data.toml": "data = 5",
        "corrupt.npz": "not a zip",
        "short.safetensors": "short",
        "partition.json": "{}",
        "policy.toml": "min_image_per_class = 5",
        "syntax.py": "def method(:\n",
        "raises.py": "x = 1\nimport nothing_of_this_name\n",
        "none.py": "x = 1\n",
        "abstract.py": "from wardround.methods.base import Method\nclass Half(Method):\n    name = 'half'\n",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "no-classes").mkdir()
    pixels, labels = images()
    save_npz(folder / "good.npz")
    save_npz(folder / "bloodmnist.npz", train_labels=labels + 5)
    save_npz(folder / "negative.npz", train_labels=labels - 1)
    save_npz(folder / "nan.npz", train_images=np.full(pixels.shape, np.nan, dtype=np.float32))
    spec = NetSpec("small", 3, 8, 28, width=2)
    save_file(fresh(spec, torch.Generator()), folder / "narrow.safetensors")
    return folder


BAD = [
    # names
    (["--method", "fedavgg"], "did you mean fedavg?"),
    (["--method", "qqq"], "there is no method 'qqq'; known are "),
    (["--model", "resnet19"], "there is no network 'resnet19'; did you mean resnet18?"),
    (["--partition", "dirichle"], "data.partition = 'dirichle'"),
    (["--preset", "qqq"], "there is no preset 'qqq'"),
    (["--preset", "FILES/none.toml"], "none.toml"),
    (["--device", "cuda"], "device 'cuda' is not there (0 CUDA devices found); use --device cpu"),
    (["--device", "cuda:7"], "device 'cuda:7' is not there"),
    (["--device", "toaster"], "device 'toaster'"),
    # settings
    (["--set", "train.lrr=1"], "there is no setting 'train.lrr'; did you mean train.lr?"),
    (["--set", "trian.lr=1"], "--set trian.lr: no study and no method that runs here has this setting; did you mean"),
    (["--set", "epochs=1"], "there is no setting 'fedavg.epochs'; did you mean train.epochs?"),
    (["--set", "fedprox.mu=1"], "--set fedprox.mu: no study and no method that runs here"),
    (["--method", "fedprox", "--set", "muu=1"], "there is no setting 'fedprox.muu'; did you mean fedprox.mu?"),
    (["--method", "fedprox", "--set", "mu=-1"], "fedprox.mu = -1"),
    (["--set", "train.lr"], "--set 'train.lr' is not key=value"),
    (["--set", "=1"], "--set '=1' is not key=value"),
    (["--set", "rounds.x=1"], "rounds.x cannot be set: rounds is a value, not a table"),
    (["--set", "data=5"], "data = 5"),
    (["--set", "name=../x"], "name = '../x'"),
    (["--set", "model.width=0"], "model.width = 0"),
    (["--set", "model.width=100000000"], "model.width = 100000000"),
    (["--set", "model.stem=imagenet"], "small has no stem 'imagenet'"),
    (["--set", "data.test=natural"], "no site ids"),
    (["--set", "data.by_patient=true"], "no patient ids"),
    (["--set", "data.min_size=50"], "min_size = 50"),
    # numbers
    (["--alpha", "0"], "data.alpha = 0.0"),
    (["--alpha", "-1"], "data.alpha = -1.0"),
    (["--alpha", "nan"], "data.alpha = nan"),
    (["--alpha", "inf"], "data.alpha = inf"),
    (["--sites", "0"], "at least 1 site, not 0"),
    (["--sites", "-1"], "data.sites = -1"),
    (["--sites", "97"], "97 sites are more than the 96 images"),
    (["--epochs", "-1"], "train.epochs = -1"),
    (["--epochs", "30,-1"], "train.epochs.1 = -1"),
    (["--epochs", "30,sixty"], "--epochs '30,sixty' is no number; write 5, or 30,60,60"),
    (["--epochs", "30,"], "--epochs '30,' is no number"),
    (["--set", "train.epochs=[]"], "train.epochs = []"),
    (["--rounds", "0"], "rounds = 0"),
    (["--set", "train.lr=0"], "train.lr = 0"),
    (["--set", "train.lr=nan"], "train.lr = nan"),
    (["--set", "train.lr=fast"], "train.lr = 'fast'"),
    (["--seed", "-1"], "seed = -1"),
    (["--partition-seed", "-1"], "data.partition_seed = -1"),
    (["--set", "participants=0"], "participants = 0"),
    (["--data", "phantoms:99999999999999"], "do not fit into memory"),
    # study files
    (["FILES/missing.toml"], "missing.toml: No such file or directory"),
    (["FILES"], "Is a directory"),
    (["FILES/broken.toml"], "broken.toml is not valid TOML"),
    (["FILES/unknown.toml"], "there is no setting 'train.learning_rat'"),
    (["FILES/toplevel.json"], "toplevel.json holds no settings"),
    (["FILES/set.toml"], "set = 5"),
    (["FILES/set-fedprox.toml", "--method", "fedprox"], "set.fedprox = 3"),
    (["FILES/data.toml"], "data = 5"),
    # images
    (["--data", "qqq"], "'qqq' is no folder"),
    (["--data", "bloodmnist"], "wardround data get bloodmnist"),
    (["--data", "phantoms:many"], "'phantoms:many'"),
    (["--data", "~nobody-of-this-name/x.npz"], "~nobody-of-this-name/x.npz does not exist"),
    (["--data", "FILES/missing.npz"], "missing.npz does not exist"),
    (["--data", "FILES/corrupt.npz"], "corrupt.npz is not an .npz file"),
    (["--data", "FILES/no-classes"], "no-classes holds no folders"),
    (["--data", "FILES/bloodmnist.npz"], "bloodmnist.npz has label 8, but bloodmnist has 8 classes"),
    (["--data", "FILES/negative.npz"], "train_labels"),
    (["--data", "FILES/nan.npz"], "NaN"),
    (["--data", "FILES/good.npz", "--partition", "natural"], "no site ids"),
    (["--set", "data.partition_file=FILES/partition.json"], "partition.json"),
    # policies
    (["--set", "policies={site-1='FILES/missing.toml'}"], "missing.toml: No such file or directory"),
    (["--set", "policies={site-1='FILES/broken.toml'}"], "broken.toml is not valid TOML"),
    (["--set", "policies={site-1='FILES/policy.toml'}"], "there is no rule 'min_image_per_class'"),
    # networks
    (["--set", "model.weights=FILES/missing.safetensors"], "missing.safetensors"),
    (["--set", "model.weights=FILES/short.safetensors"], "short.safetensors"),
    (["--set", "model.weights=FILES/narrow.safetensors"], "narrow.safetensors does not fit this network"),
    (["--set", "model.per_site.site-9=cnn4"], "'site-9', which is no site"),
    (["--set", "model.per_site.site-1=cnn4"], "fedavg needs the same model at every site"),
    (["--method", "local", "--set", "model.per_site.site-1=cnn5"], "there is no network 'cnn5'"),
    # methods of one's own
    (["--method", "FILES/missing.py"], "missing.py"),
    (["--method", "FILES/syntax.py"], "syntax.py cannot be loaded as Python: invalid syntax in line 1"),
    (["--method", "FILES/raises.py"], "No module named 'nothing_of_this_name' in line 2"),
    (["--method", "FILES/none.py"], "none.py must define exactly one Method"),
    (["--method", "FILES/abstract.py"], "abstract.py does not answer every question of a Method; add absorb, answer"),
    # flags
    (["--sites", "three"], "'--sites'"),
    (["--alpha", "small"], "'--alpha'"),
    (["--qqq", "1"], "--qqq"),
    (["--set"], "--set"),
    (["one.toml", "two.toml"], "two.toml"),
    # places
    (["--out", "FILES/good.npz"], "good.npz exists already"),
    (["--out", "FILES/good.npz/x"], "good.npz/x cannot be written"),
    (["--out", "x" * 300], "File name too long"),
    # the terminal
    (["--data", "\x1b[31mred\x07"], "\\x1b[31mred\\x07"),
    (["\x1b[2J\n.toml"], "\\x1b[2J"),
    (["--method", "\x9b2J\r.py"], "\\x9b2J"),
]


@pytest.mark.parametrize(("arguments", "culprit"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_bad_input_ends_before_anything_is_written(
    capsys: Captured, here: Path, files: Path, arguments: list[str], culprit: str
) -> None:
    given = [argument.replace("FILES", str(files)) for argument in arguments]
    assert_refused(cli(capsys, "run", *TINY, *given), culprit)
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        (["compare"], "(see: wardround compare --help)"),
        (["compare", "fedavg", "fedavg", *TINY], "named twice"),
        (["compare", "fedavg", "fedavgg", *TINY], "did you mean fedavg?"),
        (["compare", "fedavg", "fedprox", *TINY, "--set", "mu=1"], "--set mu: no study and no method"),
        (["compare", "fedavg", "fedprox", *TINY, "--set", "fedprox.mu=-1"], "fedprox.mu = -1"),
        (["compare", "local", "fedavg", *TINY, "--set", "model.per_site.site-1=cnn4"], "fedavg needs the same model"),
        (["compare", "local", "fedavg", *TINY, "--set", "policies={site-1='none.toml'}"], "cannot read the policy"),
        (["qqq"], "'qqq'"),
        (["--qqq"], "--qqq"),
        (["methods", "--jso"], "--jso"),
        (["resume"], "(see: wardround resume --help)"),
        (["resume", "qqq"], "qqq is not the directory of a run"),
        (["report", "qqq"], "there is no qqq"),
        (["report", "FILES"], "files0 has no result.json"),
        (["report", "FILES/set.toml"], "set.toml cannot be read"),
        (["data", "qqq"], "'qqq'"),
        (["data", "get"], "(see: wardround data get --help)"),
        (["data", "get", "qqq", "--quiet"], "no set qqq"),
        (["data", "get", "bloodmnist", "--size", "5", "--quiet"], "28, 64, 128, 224 pixels, not 5"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input_to_the_other_commands(
    capsys: Captured, here: Path, files: Path, arguments: list[str], culprit: str
) -> None:
    given = [argument.replace("FILES", str(files)) for argument in arguments]
    assert_refused(cli(capsys, *given), culprit)
    assert list(here.iterdir()) == []


def assert_refused(said: tuple[int, str, str], culprit: str) -> None:
    """Code 2, nothing on stdout, and on stderr one printable line that begins with `error: ` and names the culprit."""
    code, out, err = said
    assert (code, out) == (2, "")
    assert err.endswith("\n")
    line = err.removesuffix("\n")
    assert line.isprintable()
    assert line.startswith("error: ")
    assert culprit in line


@pytest.mark.parametrize("name", ["settings.json", "data.json", "comparison.json", "result.json"])
def test_a_damaged_run_directory_is_refused(capsys: Captured, name: str) -> None:
    ok(capsys, "compare", "majority", *TINY, "--out", "x")
    (Path("x") / name).write_text('{"rounds')
    assert_refused(cli(capsys, "resume", "x", "--quiet"), f"x/{name}")
