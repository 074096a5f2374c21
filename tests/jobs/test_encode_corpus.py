"""Encoding: the vectors of the encoder itself, resumed to the same bytes; nothing else under their name."""

from __future__ import annotations

import json
import platform
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from samples import WORDS, files_of, make_passages, save_tiny_bert, write_beir

from riptide.base.cuts import Cuts
from riptide.indexing.corpus.corpus import Corpus
from riptide.indexing.embeddings.corpus_encoding import count_pending
from riptide.indexing.embeddings.dense_embeddings import Embeddings
from riptide.indexing.maintenance.verification import verify
from riptide.indexing.store.sealed_json import add_own_hash, check_own_hash, sum_cuts
from riptide.indexing.store.store import Store
from riptide.retriever.encoding.encoder import Encoder, EncoderOptions
from riptide.retriever.forward import int8

Done = Callable[..., str]
NUMERICS = ("--dtype", "float32", "--compile", "never")
MINILM = "all-MiniLM-L6-v2"
PARTS = ("part-00001", "part-00002")


def command(world, *more: object) -> tuple:
    return ("encode_corpus", "--store", world.store, "--encoder", world.model, *NUMERICS, *more)


def test_vectors_are_those_of_the_encoder_part_by_part(world) -> None:
    corpus = Corpus.open(Store(str(world.store)))
    embeddings = Embeddings.open(Store(str(world.store)), "enc", corpus)
    encoder = Encoder(world.model, EncoderOptions(dtype="float32", compile="never"), threads=2)
    assert [part.part.rows for part in embeddings.parts] == [60] * 4
    for part in embeddings.parts:
        rows = world.passages[part.first_row : part.end]
        texts = encoder.compose([row["title"] for row in rows], [row["text"] for row in rows])
        expected = encoder.encode(texts, side="passage").astype(np.float16)
        assert expected.std() > 0
        np.testing.assert_array_equal(embeddings.vectors(part), expected)
    config = embeddings.config
    assert config["encoder"] == encoder.config
    assert config["numerics"] == encoder.numerics
    assert "corpus/g0000" in str(embeddings.generations[0].inputs)


def test_what_is_left_is_encoded_and_the_rest_kept(world, done: Done) -> None:
    """The manifest, a part with its record and another's record are lost, as by a crash: the same bytes come back."""
    before = files_of(world.store)
    folder = world.store / "embeddings/enc/g0000"
    lost = [folder / "manifest.json", folder / "provenance.json"]
    lost += [*folder.glob(f"{PARTS[0]}*"), folder / f"{PARTS[1]}.json"]
    assert len(lost) == 5
    for path in lost:
        path.unlink()
    kept = {path: path.stat().st_mtime_ns for path in folder.iterdir() if PARTS[1] not in path.name}
    del kept[folder / "manifest.begun.json"]  # its time shows that a command works on the embeddings
    store = Store(str(world.store))
    counts = [count_pending(store, *of) for of in (("enc", None), ("enc", 120), ("enc", 121), ("other", None))]
    assert counts == [2, 1, 2, 4], "an autoscaler adds nodes for so many encoders"
    out = done(*command(world, "--name", "enc"))
    assert count_pending(store, "enc", None) == 0
    assert "240 passages (120 kept)" in out
    assert files_of(world.store) == before
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


@pytest.mark.parametrize("is_append", [False, True])
def test_an_encoder_whose_output_has_moved_does_not_add_vectors(
    world, job, refused, done, monkeypatch, documented: Callable[..., None], is_append: bool
) -> None:
    """The model's files are the same. As by another version of torch, its normalisation returns other values."""
    folder, at = world.store / "embeddings/enc/g0000", f"{world.store}/embeddings/enc/g0000: the encoder on"
    if is_append:
        more = write_beir(world.store / "more", [{"_id": "new", "title": "", "text": "another passage"}])
        done("import_corpus", "--store", world.store, "--source", more, "--append")
    else:
        for path in (folder / "manifest.json", folder / "provenance.json", *folder.glob("part-00000*")):
            path.unlink()
    before, shift = files_of(world.store), 1.0
    layer_norm = torch.nn.functional.layer_norm
    monkeypatch.setattr(torch.nn.functional, "layer_norm", lambda *args, **kw: layer_norm(*args, **kw).add_(shift))
    line = refused(*command(world, "--name", "enc"))
    assert line.startswith(f"error: {at} {platform.node()} gives other vectors than those stored: smallest similarity 0.")
    assert "of 8 passages, expected at least 0.99: use the versions" in line
    if not is_append:
        line = re.sub(r"similarity 0\.\d+", "similarity 0.…", line.replace(f"on {platform.node()}", "on …"))
        documented("Encoding", "encode_corpus that resumes with an encoder whose vectors are others now", line, 1)
    assert files_of(world.store) == before
    shift = 0.02
    outcome = job(*command(world, "--name", "enc"))
    assert (outcome.status, outcome.out.count(f"warning: {at}")) == (0, 1)
    assert "expected at least 0.999" in outcome.out


def test_finished_embeddings_are_found_done(world, done: Done, no_work) -> None:
    no_work()
    before = {path: path.stat().st_mtime_ns for path in world.store.rglob("*") if path.is_file()}
    assert "embeddings/enc/g0000: 240 vectors of 32, " in done(*command(world, "--name", "enc"))
    assert {path: path.stat().st_mtime_ns for path in world.store.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("option", "difference"),
    [
        (("--pooling", "cls"), "encoder.pooling mean, now cls"),
        (("--title", "none"), "encoder.title space, now none"),
        (("--passage-prefix", "passage: "), 'encoder.passage_prefix "", now "passage: "'),
        (("--passage-length", "20"), "encoder.passage_length 64, now 20"),
    ],
)
def test_another_encoding_under_the_same_name_is_refused_with_both_sides(
    world, refused, option, difference: str, no_work
) -> None:
    no_work()
    before = files_of(world.store)
    line = refused(*command(world, "--name", "enc", *option))
    assert f"{world.store}/embeddings/enc/g0000 was made otherwise" in line
    assert difference in line
    assert files_of(world.store) == before


def test_equal_embeddings_under_another_name_are_named(world, done: Done) -> None:
    name = Path(world.model).name
    line = (
        f"warning: embeddings/enc has the same encoder and settings; this command makes embeddings/{name} "
        "too: give --name enc to extend that one instead"
    )
    assert done(*command(world, "--plan")).splitlines()[0] == line
    for other in (("--name", name), ("--passage-length", 20), ("--limit", 5)):
        assert "same encoder" not in done(*command(world, *other, "--plan")), "a name, or other vectors"
    assert line in done(*command(world)).splitlines()
    assert "same encoder" not in done(*command(world)), "these embeddings exist now"


def test_another_encoder_under_the_same_name_is_refused(world, refused, tmp_path: Path, no_work) -> None:
    no_work()
    other = save_tiny_bert(tmp_path / "other", seed=1)
    line = refused("encode_corpus", "--store", world.store, "--encoder", other, "--name", "enc", *NUMERICS)
    made = f"/embeddings/enc/g0000 was made otherwise: --encoder {world.model}, now {other}; "
    assert f"{made}give --encoder {world.model}, or another name (--name), or, if nobody needs it" in line


def test_limit_names_the_embeddings_and_is_of_their_fingerprint(world, done: Done) -> None:
    out = done(*command(world, "--limit", 70))
    name = Path(world.model).name
    assert f"embeddings/{name}/g0000: 70 vectors of 32" in out
    store = Store(str(world.store))
    limited, full = (store.open("embeddings", f"{n}/g0000") for n in (name, "enc"))
    assert [part.rows for part in limited.numbered_parts("part")] == [60, 10]
    assert limited.fingerprint != full.fingerprint
    first = np.load(limited.local_path("part-00000"))
    np.testing.assert_array_equal(first, np.load(full.local_path("part-00000")))


def test_plan_says_what_and_does_nothing(world, done: Done, no_work) -> None:
    no_work()
    before = files_of(world.store)
    out = done(*command(world, "--name", "new", "--limit", 100, "--plan"))
    assert "240 passages in 4 parts" in out
    assert "100 vectors, 6.4 kB of float16" in out
    assert "numerics cpu " in out
    assert files_of(world.store) == before


def test_bad_encoders_and_stores_are_named(world, refused, tmp_path: Path, no_work) -> None:
    no_work()
    before = files_of(world.store)
    at = ("encode_corpus", "--store", world.store, "--encoder")
    assert "no-such/model: no such local folder" in refused(*at, "no-such/model")
    assert f"{tmp_path}/none: no such folder" in refused(*at, tmp_path / "none")
    (tmp_path / "hollow").mkdir()
    assert f"{tmp_path}/hollow: no config.json" in refused(*at, tmp_path / "hollow")
    assert "--dimension 33: more than the 32" in refused(*command(world, "--dimension", 33))
    assert "--passage-length 65: more than the 64 positions" in refused(*command(world, "--passage-length", 65))
    assert "--passage-length 0: expected at least 1" in refused(*command(world, "--passage-length", 0))
    assert "name 'a b'" in refused(*command(world, "--name", "a b"))
    assert files_of(world.store) == before
    assert "there is no store here" in refused("encode_corpus", "--store", tmp_path / "s", "--encoder", world.model)
    assert not (tmp_path / "s").exists()


def test_int8_vectors_are_those_of_the_encoder_and_of_its_queries(
    world, done: Done, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert " int8 packed " in done("encode_corpus", "--store", world.store, "--encoder", MINILM, "--dtype", "int8")
    embeddings = Embeddings.open(Store(str(world.store)), "all-MiniLM-L6-v2", Corpus.open(Store(str(world.store))))
    encoder = Encoder(MINILM, EncoderOptions(dtype="int8"), threads=1)
    part, rows = embeddings.parts[0], world.passages[:60]
    texts = encoder.compose([row["title"] for row in rows], [row["text"] for row in rows])
    expected = encoder.encode(texts, side="passage").astype(np.float16)
    np.testing.assert_array_equal(embeddings.vectors(part), expected)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # a machine with a GPU uses its CPU as well
    done("search", "--store", world.store, "--embeddings", "all-MiniLM-L6-v2", "--name", "int8")
    [record] = Path(world.store, "runs/int8").glob("part-*.json")
    assert " int8 packed " in json.loads(record.read_text())["facts"]["query_numerics"]["all-MiniLM-L6-v2"]


def test_a_decoder_in_place_of_an_encoder_is_refused_with_the_remedy(
    world, refused, no_work, tmp_path: Path, documented: Callable[..., None]
) -> None:
    no_work()
    before = files_of(world.store)
    folder = Path(save_tiny_bert(tmp_path / "tiny"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "is_decoder": True}))
    line = refused("encode_corpus", "--store", world.store, "--encoder", folder)
    assert line.endswith("set it to false, or, if the model was trained so, encode with --compile always")
    documented("Encoding", "encode_corpus of a BERT model whose config.json has is_decoder true", line, 1)
    assert files_of(world.store) == before


def test_int8_is_refused_where_there_is_none(
    world, refused, no_work, tmp_path: Path, documented: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    no_work()
    before = files_of(world.store)
    at = ("encode_corpus", "--store", world.store, "--dtype", "int8", "--encoder")
    line = refused(*at, save_tiny_bert(tmp_path / "tiny"))
    assert "tiny/config.json: hidden_size 32: int8 needs a multiple of 64" in line
    documented("Encoding", "encode_corpus --dtype int8 of a model whose widths do not fit", line, 1)

    line = refused(*at, MINILM, "--gpus", 1)
    assert line == "error: --gpus 1: --dtype int8 runs on the CPU: leave out --gpus, or use bfloat16"
    documented("Encoding", "encode_corpus --dtype int8 --gpus 1", line, 1)

    def refuse() -> None:
        raise OSError("no C++ compiler (install g++)")

    monkeypatch.setattr(int8, "load_kernel", refuse)
    line = refused(*at, MINILM)
    assert line == "error: --dtype int8: no C++ compiler (install g++); use bfloat16 or float32"
    documented("Encoding", "encode_corpus --dtype int8 without a C++ compiler", line, 1)
    assert files_of(world.store) == before


def test_weights_that_cannot_be_loaded_end_the_job_in_one_line(world, refused, tmp_path: Path) -> None:
    broken = Path(save_tiny_bert(tmp_path / "broken"))
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    keys = Store(str(world.store)).keys()
    assert str(broken) in refused("encode_corpus", "--store", world.store, "--encoder", broken, *NUMERICS)
    assert Store(str(world.store)).keys() == keys


def test_a_corpus_that_is_not_complete_is_not_encoded(world, refused) -> None:
    (world.store / "corpus/g0000/manifest.json").unlink()
    line = refused(*command(world, "--name", "more"))
    assert f"{world.store}/corpus/g0000 was begun and is not complete: run the command that makes it again" in line


def test_a_damaged_corpus_part_is_not_encoded(world, refused) -> None:
    [part] = (world.store / "corpus/g0000").glob("part-00002-*.arrow")
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    line = refused(*command(world, "--name", "more"))
    assert f"corpus/g0000/{part.name}: its sha256 is not the committed one" in line
    assert Store(str(world.store)).names("embeddings") == ["enc"]


def test_a_full_disk_is_one_line_and_the_same_command_goes_on(tmp_path: Path, model: str, done: Done, refused) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", small], capture_output=True).returncode:
        pytest.fail("the test mounts a small tmpfs, which needs root")
    try:
        source = write_beir(tmp_path / "raw", make_passages(600))
        done("import_corpus", "--store", small / "s", "--source", source, "--part-size", 200)
        filler = small / "filler"
        used = int(subprocess.run(["du", "-sk", small], capture_output=True, check=True).stdout.split()[0])
        filler.write_bytes(b"x" * ((8 * 1024 - used - 40) * 1024))  # room for two parts of 12.8 kB and their records
        encode = ("encode_corpus", "--store", small / "s", "--encoder", model, "--name", "enc", *NUMERICS)
        line = refused(*encode)
        assert "No space left on device: free some space and run the same command again" in line
        store = Store(str(small / "s"))
        assert store.keys() == ["corpus/g0000"]
        assert list((small / "s/.tmp").iterdir()) == []
        filler.unlink()
        done(*encode)
        assert store.keys() == ["corpus/g0000", "embeddings/enc/g0000"]
        assert all(finding.problem is None for finding in verify(store))
    finally:
        subprocess.run(["umount", "-l", small], check=True)


def test_provenance_names_the_command_but_is_of_no_fingerprint(world) -> None:
    provenance = json.loads((world.store / "embeddings/enc/g0000/provenance.json").read_text())
    assert provenance["versions"]["ray"]
    assert "host" not in (world.store / "embeddings/enc/g0000/manifest.json").read_text()


def import_words(done: Done, tmp_path: Path, lengths: Sequence[int], *more: object) -> Path:
    """Imports passages of given numbers of words, a token each, in parts of ten; returns the store."""
    name = f"source{len(list(tmp_path.glob('source*')))}"
    passages = [
        {"_id": f"{name}-{number}", "title": "", "text": " ".join(WORDS[:length])}
        for number, length in enumerate(lengths)
    ]
    store = tmp_path / "store"
    done("import_corpus", "--store", store, "--source", write_beir(tmp_path / name, passages), "--part-size", 10, *more)
    return store


def counted(store: Path, name: str) -> Cuts:
    """Returns the counts in the parts of all generations of embeddings."""
    generations = Store(str(store)).generations("embeddings", name)
    return sum_cuts(part for artifact in generations for part in artifact.numbered_parts("part"))


LONG = [100 if number % 3 == 0 else 20 for number in range(30)]
WARNING = (
    "warning: 10 of 30 passages were cut to 64 tokens; 74% of all tokens were kept; split long documents into "
    "passages, as riptide import-corpus --split-words does, because the model allows no more tokens"
)


def test_cut_passages_are_counted_over_all_workers_and_runs(
    tmp_path: Path, model: str, done: Done, interrupt, documented: Callable[..., None]
) -> None:
    store = import_words(done, tmp_path, LONG)
    encode = ("encode_corpus", "--store", store, "--encoder", model, *NUMERICS, "--cpus", 1)
    expected = Cuts(30, 10 * 102 + 20 * 22, 10, 10 * (102 - 64), 64)
    *_, line = done(*encode, "--name", "two", "--max-workers", 2).splitlines()
    assert line == WARNING
    assert counted(store, "two") == expected
    documented("Encoding", "encode_corpus of passages that are longer than the model's limit", line, 0)

    interrupt(2, *encode, "--name", "one", "--max-workers", 1)
    out = done(*encode, "--name", "one", "--max-workers", 1)
    assert "kept)" in out
    assert out.splitlines()[-1] == line
    assert files_of(store / "embeddings/one") == files_of(store / "embeddings/two")
    assert done(*encode, "--name", "one").splitlines()[-1] == line, "also of complete embeddings"
    shown = done("store", "show", "embeddings/one/g0000", "--store", store)
    assert f"\ncuts         {expected.sentence('passages')}\n" in shown

    out = done(*encode, "--name", "short", "--passage-length", 30, "--passage-prefix", f"{WORDS[0]} {WORDS[1]} ")
    assert counted(store, "short") == Cuts(30, 10 * 104 + 20 * 24, 10, 10 * 74, 30)
    assert "give a larger --passage-length under another --name (the model allows at most 64), or split" in out


def test_parts_of_earlier_releases_have_no_counts(tmp_path: Path, model: str, done: Done) -> None:
    store = import_words(done, tmp_path, LONG[:20])
    encode = ("encode_corpus", "--store", store, "--encoder", model, "--name", "enc", *NUMERICS)
    done(*encode)
    folder = store / "embeddings/enc/g0000"
    before = Store(str(store)).open("embeddings", "enc/g0000").fingerprint
    for file in (folder / "manifest.json", *folder.glob("part-?????.json")):
        document = check_own_hash(file.read_bytes(), file.name)
        for record in document.get("parts", [document]):
            del record["facts"]["cuts"]
        file.write_bytes(add_own_hash(document))
    old = files_of(store)
    assert "were cut" not in done(*encode)
    assert files_of(store) == old
    assert all(finding.problem is None for finding in verify(Store(str(store))))
    assert Store(str(store)).open("embeddings", "enc/g0000").fingerprint == before

    import_words(done, tmp_path, LONG[20:], "--append")
    *_, line = done(*encode).splitlines()
    assert line.startswith("warning: 3 of 10 passages were cut to 64 tokens (20 more passages were not counted); 75.")
    assert counted(store, "enc") == Cuts(10, 3 * 102 + 7 * 22, 3, 3 * 38, 64, 20)


@pytest.mark.parametrize(("long", "start"), [(0, None), (5, "5 of 100"), (6, "warning: 6 of 100")])
def test_more_than_five_percent_of_the_passages_are_a_warning(
    tmp_path: Path, model: str, done: Done, long: int, start: str | None
) -> None:
    store = import_words(done, tmp_path, [63] * long + [62] * (100 - long))
    out = done("encode_corpus", "--store", store, "--encoder", model, "--name", "enc", *NUMERICS)
    if start is None:
        assert "were cut" not in out
        assert counted(store, "enc") == Cuts(100, 6400, limit=64)
    else:
        assert out.splitlines()[-1].startswith(f"{start} passages were cut to 64 tokens; 99.9% of all tokens were kept")


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("case", "options", "answer"),
    [
        (
            "--cpus above the cores of every node, on a cluster that does not grow",
            ("--cpus", 10_000),
            "--cpus 10000: expected at most 2, the cores of the largest node",
        ),
        (
            "--min-workers above the room of the cluster after --wait",
            ("--cpus", 1, "--min-workers", 3, "--wait", 1),
            "--min-workers 3: the nodes have 2 CPUs, room for 2 of 3 workers of 1 CPU, after 1 s; --wait SECONDS waits "
            "for more nodes",
        ),
        (
            "--node-label that no node has, on a cluster that does not grow",
            ("--node-label", "kind=gpu"),
            "--node-label kind=gpu: no node has it; the nodes have no labels",
        ),
        (
            "--gpus 1 on a cluster without GPUs that does not grow",
            ("--gpus", 1),
            "--gpus 1: expected nodes with GPUs, there are none; --wait SECONDS waits for more nodes",
        ),
    ],
)
def test_workers_without_nodes_are_refused(
    local_ray: None,
    world,
    refused,
    documented: Callable[..., None],
    case: str,
    options: tuple[object, ...],
    answer: str,
) -> None:
    """Last in this file, as the process stays connected to the Ray until the module ends."""
    before = files_of(world.store)
    line = refused("encode_corpus", "--store", world.store, "--encoder", world.model, "--name", "x", *options)
    assert line == f"error: {answer}"
    documented("Clusters", case, line, 1)
    assert files_of(world.store) == before
