"""Sequences of documents: positions, best-fit rows, loss masks, and models that keep documents apart."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import quantshard as qs
from quantshard.errors import ConfigurationError
from quantshard.modules import chunked_loss
from quantshard.tools.trainer.data import Corpus, Windows, collect, packing as packs
from quantshard.tools.trainer.data.chats import ChatTokenizer
from quantshard.tools.trainer.data.packing import (
    FLAGGED,
    IGNORED,
    STARTS,
    TOKEN,
    UNTRAINED,
    Documents,
    best_fit,
    describe_rows,
)
from quantshard.tools.trainer.data.shards import ShardedSource, read_index
from quantshard.tools.trainer.data.sources import Chat, TextOptions, find
from quantshard.tools.trainer.data.tokenizer import ByteTokenizer, load_tokenizer
from quantshard.tools.trainer.loop import source_name
from quantshard.tools.trainer.models import huggingface, model as models
from quantshard.tools.trainer.settings.config import TrainSettings, from_mapping
from quantshard.tools.trainer.settings.values import PACKINGS
from tests.tools.cli import sources

BOUNDARIES = torch.tensor([[0, 3, 8]], dtype=torch.int32)
TEMPLATE = (
    "{% for m in messages %}<|im|>{{ m.role }}\n{{ m.content }}<|im|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|im|>{% endif %}\n{% endfor %}"
)
TURNS = [
    {"role": "user", "content": "shard the scale"}, {"role": "assistant", "content": "of a block"},
    {"role": "user", "content": "and amax"}, {"role": "assistant", "content": "in codes"},
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Texts of 1 to 17 bytes, each of one letter."""
    (tmp_path / "texts").mkdir()
    for i in range(40):
        (tmp_path / "texts" / f"{i:02}.txt").write_bytes(bytes([97 + i % 26]) * (i * 7 % 17 + 1))
    return tmp_path


# Sequences


def test_positions_restart_where_documents_begin(folder: Path) -> None:
    """The token that ends a document is predicted in it, and is the first input of the next one."""
    corpus = collect([str(folder / "texts")])
    stream, documents = (Windows(corpus, 20, 0.1, packing) for packing in ("stream", "documents"))
    for step in range(50):
        plain, batch = stream.batch(3, step, 0, 4), documents.batch(3, step, 0, 4)
        assert torch.equal(batch[:, :2], plain) and plain.shape == (4, 2, 20)
        for tokens, targets, positions, starts in batch:
            assert torch.equal(tokens[1:], targets[:-1])
            expected = [0]
            for token in tokens[1:].tolist():
                expected.append(0 if token == 256 else expected[-1] + 1)
            assert positions.tolist() == expected
            first = [index for index, position in enumerate(expected) if position == 0]
            assert starts.tolist() == first + [20] * (20 - len(first))
        assert packs.most_documents(batch) == (batch[:, 2] == 0).sum(1).max()
        assert packs.split(batch, 20)[2].boundaries[:, :20].equal(batch[:, 3].int())  # type: ignore[union-attr]
    [source] = documents.sources
    every = torch.stack([source.training(first) for first in range(source.boundary - 20)])
    assert source.most_documents() - packs.most_documents(every) in (0, 1)


def test_padding_is_one_document() -> None:
    """Its positions are 0, so that all of its tokens have the same queries, keys and values."""
    pieces = [torch.tensor([256, 1, 2, 3]), torch.tensor([5, 6])]
    rows = packs.sequence(pieces, 8, 256, "best-fit")
    assert rows.tolist() == [
        [256, 1, 2, 5, 256, 256, 256, 256], [1, 2, 3, 6] + [IGNORED] * 4, [0, 1, 2] + [0] * 5, [0, 3, 4] + [8] * 5,
    ]  # fmt: skip
    _, _, documents = packs.split(rows.expand(40, -1, -1))
    assert documents is not None and documents.boundaries.tolist() == [[0, 3, 4, 8]] * 40


@pytest.mark.parametrize("seed", range(3))
def test_best_fit_is_the_definition(seed: int) -> None:
    """Against a search through all rows."""
    lengths = (np.random.default_rng(seed).lognormal(2.5, 1, 300).astype(int) % 64 + 1).tolist()
    rows = best_fit(lengths, 64)
    assert sorted(item for row in rows for item in row) == list(range(300))
    spaces: list[int] = []
    for length in sorted(lengths, reverse=True):
        room = [space for space in spaces if space >= length]
        if room:
            spaces.remove(min(room))
        spaces.append((min(room) if room else 64) - length)
    assert sorted(64 - sum(lengths[item] for item in row) for row in rows) == sorted(spaces)


def predictions(rows: list[Tensor]) -> list[tuple[int, ...]]:
    """Document by document, tokens and the last target, of sequences with positions; without padding."""
    found = []
    for tokens, targets, positions, _ in rows:
        starts = [*(positions == 0).nonzero()[:, 0].tolist(), len(tokens)]
        for first, end in itertools.pairwise(starts):
            if (targets[first:end] != IGNORED).any():
                found.append((*tokens[first:end].tolist(), targets[end - 1].item()))
    return found


def test_rows_hold_each_document_once_an_epoch(folder: Path) -> None:
    """Those longer than a row in pieces, and none of the held-out tokens; in another order in the next epoch."""
    corpus = collect([str(folder / "texts")])
    windows = Windows(corpus, 12, 0.15, "best-fit", 4)
    [packed] = windows.rows
    count = -(-packed.num_rows // 4) * 4
    batches = [windows.batch(7, step, 0, 4) for step in range(1, count // 2 + 1)]
    rows = [row for batch in batches for row in batch]
    for step, batch in enumerate(batches, 1):
        again = Windows(corpus, 12, 0.15, "best-fit", 4)
        assert torch.equal(torch.cat([again.batch(7, step, rank * 2, 2) for rank in range(2)]), batch)
    first, second = rows[: packed.num_rows], rows[packed.num_rows : 2 * packed.num_rows]
    assert predictions(first) != predictions(second) and sorted(predictions(first)) == sorted(predictions(second))
    expected, position = [], 0
    for document in corpus.documents:
        tokens = [*document.path.read_bytes(), 256]
        tokens = tokens[: max(0, windows.sources[0].boundary - position)]
        position += document.tokens
        if tokens:
            whole = [256, *tokens] if expected else tokens
            expected += [tuple(whole[at : at + 13]) for at in range(0, len(whole) - 1, 12)]
    assert sorted(predictions(first)) == sorted(expected)
    padding = 1 - sum(len(found) - 1 for found in expected) / (packed.num_rows * 12)
    assert describe_rows(windows.rows).endswith(f"{padding:.2%} padding") and 0 <= padding < 0.2
    heldout = predictions([row for _, row in windows.heldout(100)])
    assert sum(len(found) - 1 for found in heldout) == windows.sources[0].tokens - windows.sources[0].boundary - 1


def test_rows_of_token_files(tmp_path: Path) -> None:
    """Of two files; an empty document is left out."""
    np.array([5, 6, 0, 0, 7, 0, 8], "<u2").tofile(tmp_path / "a.bin")
    np.array([9, 0, 1, 2, 3, 0, 4, 4, 4], "<u2").tofile(tmp_path / "b.bin")
    paths = [str(tmp_path / name) for name in ("a.bin", "b.bin")]
    windows = Windows(collect(paths, like=Corpus((), vocabulary=10, end_of_document=0)), 4, 0.0, "best-fit")
    found = sorted(predictions([windows.sources[0].training(n) for n in range(windows.rows[0].num_rows)]))
    assert found == [(0, 1, 2, 3, 0), (0, 4, 4, 4), (0, 7, 0), (0, 8, 9, 0), (5, 6, 0)]


def test_a_run_of_before_keeps_its_stream() -> None:
    assert TrainSettings().packing == "documents" and from_mapping({"steps": 3}, "") == {"steps": 3}
    assert from_mapping({"steps": 3, "corpus": {}}, "") == {"steps": 3, "packing": "stream"}
    assert from_mapping({"packing": "best-fit", "corpus": {}}, "") == {"packing": "best-fit"}


# Chats


def chat(**row: object) -> Chat:
    return Chat("a.jsonl, line 3", dict(row))


def trained_text(values: np.ndarray, tokenizer: Path) -> str:
    from tokenizers import Tokenizer

    assert values[0] & STARTS and (values & FLAGGED).all() and not (values[1:] & STARTS).any()
    ids = [int(value & TOKEN) for value in values if not value & UNTRAINED]
    return str(Tokenizer.from_file(str(tokenizer / "tokenizer.json")).decode(ids, skip_special_tokens=False))


@pytest.mark.parametrize(("template", "ends"), [(TEMPLATE, "<|im|>\n"), (MARKED, "<|im|>")])
def test_assistant_tokens_are_trained(tmp_path: Path, template: str, ends: str) -> None:
    """By the marks of the template, or by prefixes; all tokens are those of transformers."""
    transformers = pytest.importorskip("transformers")
    path = sources.tokenizer_folder(tmp_path, eos_token=sources.END, chat_template=template)
    tokenizer = ChatTokenizer(load_tokenizer(str(path)), str(path))
    values = tokenizer.encode(chat(messages=TURNS))
    assert trained_text(values, path) == f"of a block{ends}in codes{ends}"
    made = transformers.AutoTokenizer.from_pretrained(path).apply_chat_template(TURNS, tokenize=True, return_dict=True)
    assert (values & TOKEN).tolist() == made["input_ids"]
    values = tokenizer.encode(chat(prompt="shard the scale", completion=" of a block"))
    assert trained_text(values, path) == f" of a block{sources.END}"


def test_chats_that_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    stripping = TEMPLATE.replace("{{ m.content }}", "{% if loop.last %}{{ m.content }}{% endif %}")
    paths = {
        name: str(sources.tokenizer_folder(tmp_path / name, eos_token=sources.END, **config))
        for name, config in {
            "good": {"chat_template": TEMPLATE}, "none": {}, "strips": {"chat_template": stripping},
            "fails": {"chat_template": "{{ raise_exception('no ' + messages[0].role) }}"},
        }.items()
    }  # fmt: skip
    cases: list[tuple[str, dict[str, object], str]] = [
        ("good", {"messages": TURNS[:1]}, "line 3: the chat has no assistant turn; remove the row"),
        ("good", {"messages": []}, "line 3: the chat has no assistant turn"),
        ("good", {"messages": "text"}, "line 3: messages must be a list of tables"),
        ("good", {"prompt": "a", "completion": None}, "line 3: prompt and completion must be texts"),
        ("none", {"messages": TURNS}, "none has no chat template"),
        ("strips", {"messages": TURNS}, "changes earlier turns; mark the assistant's text"),
        ("fails", {"messages": TURNS}, "line 3: the chat template fails: TemplateError: no user"),
    ]
    for name, row, says in cases:
        with pytest.raises(ConfigurationError) as caught:
            ChatTokenizer(load_tokenizer(paths[name]), paths[name]).encode(chat(**row))
        assert says in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(ConfigurationError, match="chats need --tokenizer"):
        ChatTokenizer(ByteTokenizer(), "").encode(chat(messages=TURNS))


def test_chats_become_masked_sequences(tmp_path: Path) -> None:
    """In each kind of packing; a chat starts with its own first token, not with the end of the one before."""
    rows = [{"id": 3, "prompt": "ab"[: i % 2 + 1], "completion": "xyz" * (i % 4 + 1)} for i in range(30)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    [source] = find([str(tmp_path / "a.jsonl")])
    index = ShardedSource(source, ByteTokenizer(), "", TextOptions()).write(tmp_path / "made")
    assert (index.dtype, index.documents) == ("masked", 30) and read_index(tmp_path / "made") == index
    corpus = collect([str(tmp_path / "made")])
    assert corpus.is_masked
    for packing in PACKINGS:
        windows = Windows(corpus, 16, 0.0, packing)
        batch = windows.batch(0, 1, 0, 64)
        tokens, targets, documents = packs.split(batch)
        assert tokens.max() <= 256 and set(targets.unique().tolist()) == {IGNORED, *b"xyz", 256}
        if documents is not None:
            assert set(tokens[:, 1:][documents.positions[:, 1:] == 0].tolist()) <= {ord("a"), 256}
            inner = (tokens == 256) & (targets != IGNORED)
            assert not inner.any()
    found = predictions([windows.sources[0].training(n) for n in range(windows.rows[0].num_rows)])
    assert sorted(bytes(tokens[:-1]) for tokens in found) == sorted(
        f"{row['prompt']}{row['completion']}".encode() for row in rows
    )


def test_texts_and_chats_do_not_mix(tmp_path: Path) -> None:
    rows = [{"text": "ab"}, {"messages": TURNS}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigurationError, match=r"a\.jsonl holds texts and chats"):
        ShardedSource(find([str(tmp_path / "a.jsonl")])[0], ByteTokenizer(), "", TextOptions()).write(tmp_path / "x")


# Models


def separate(model: nn.Module, packed: Tensor) -> list[Tensor]:
    """Logits of each document of a batch, computed on its own."""
    result = []
    for tokens, _, positions, _ in packed:
        starts = [*(positions == 0).nonzero()[:, 0].tolist(), len(tokens)]
        for first, end in itertools.pairwise(starts):
            result.append(models.logits(model, tokens[None, first:end])[0])
    return result


@pytest.mark.parametrize("changes", [{}, {"architecture": "gpt"}, {"experts": 4}, {"recompute": "layer"}], ids=str)
def test_documents_of_a_packed_batch_are_those_on_their_own(folder: Path, changes: dict[str, object]) -> None:
    """Logits and gradients; in float32, where sums of other lengths differ by some ulps of values of order one."""
    settings = replace(
        TrainSettings(), hidden=32, heads=4, kv_heads=2, layers=2, ffn=64, seq_length=24, params_dtype="float32",
        recipe="bf16", balance_loss=0.0, **changes,  # type: ignore[arg-type]
    ).resolved()  # fmt: skip
    torch.manual_seed(0)
    model = models.LanguageModel(settings, models.recipes_of(settings), "cpu")
    batch = Windows(collect([str(folder / "texts")]), 24, 0.0, "documents").batch(0, 1, 0, 3)
    tokens, targets, documents = packs.split(batch)
    logits = models.logits(model, tokens, documents)
    apart = torch.cat(separate(model, batch))
    assert documents is not None and (documents.positions == 0).sum() > 8
    torch.testing.assert_close(logits.flatten(0, 1), apart, atol=2e-5, rtol=2e-5)
    gradients = []
    for value in (logits, apart):
        model.zero_grad()
        models.loss(value.view_as(logits), targets).backward()
        gradients.append([param.grad.clone() for param in model.parameters() if param.grad is not None])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-4)
    assert not torch.allclose(models.logits(model, tokens), logits, atol=1e-3)


def test_losses_of_trained_tokens() -> None:
    """Against PyTorch, with a divisor of the whole step, without and with all logits."""
    torch.manual_seed(0)
    settings = replace(TrainSettings(), hidden=32, heads=2, layers=1, seq_length=8, params_dtype="float32",
                       recipe="bf16").resolved()  # fmt: skip
    model = models.LanguageModel(settings, models.recipes_of(settings), "cpu")
    tokens = torch.randint(0, 257, (2, 8))
    targets = torch.where(torch.rand(2, 8) < 0.4, IGNORED, tokens.roll(-1, 1))
    count = torch.tensor(11.0)
    gradients = []
    for losses in (
        models.losses(model, tokens, targets, 1e-2, None, count),
        models.TokenLosses(*split_z(model(tokens, targets, z_loss=1e-2, num_items_in_batch=count))),
    ):
        logits = model(tokens).flatten(0, 1)
        expected = nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum") / 11
        z_loss = (logits.logsumexp(-1).square() * (targets.flatten() != IGNORED)).sum() / 11
        torch.testing.assert_close(losses.cross_entropy, expected)
        torch.testing.assert_close(losses.z_loss, z_loss)
        for value in (losses.cross_entropy + 1e-2 * losses.z_loss, expected + 1e-2 * z_loss):
            model.zero_grad()
            if value.requires_grad:
                value.backward()
                gradients.append(model.embedding.weight.grad.clone())
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], atol=1e-7, rtol=1e-5)


def split_z(results: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    total, z_part = results
    return total - z_part, z_part / 1e-2


def test_models_that_mix_documents_are_refused() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 32}
    tokens, documents = torch.arange(8)[None], Documents(torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]]), BOUNDARIES)
    opt = transformers.OPTForCausalLM(
        transformers.OPTConfig(
            **sizes, ffn_dim=16, num_attention_heads=2, word_embed_proj_dim=16, max_position_embeddings=16
        )
    )
    mamba = transformers.MambaForCausalLM(transformers.MambaConfig(**sizes, state_size=4))
    for model in (opt, mamba):
        with pytest.raises(ConfigurationError, match=r"would mix the documents of a sequence; give --packing stream"):
            huggingface.run_model(model, tokens, documents)
    config = transformers.Lfm2Config(
        **sizes, intermediate_size=16, num_attention_heads=2, num_key_value_heads=2, layer_types=["conv"] * 2
    )
    with pytest.raises(ConfigurationError, match=r"layers of type conv would mix"):
        huggingface.check_documents(transformers.Lfm2ForCausalLM(config), "x")


@pytest.mark.parametrize("is_packed", [False, True])
def test_transformers_models_compute_their_loss_in_chunks(is_packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a divisor of the whole step and ignored targets: loss and gradients are those of all logits at once."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).train()
    qs.convert(model, "mxfp8")
    tokens = torch.randint(0, 64, (2, 8))
    targets = torch.where(torch.rand(2, 8) < 0.4, IGNORED, tokens.roll(-1, 1))
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]]).expand(2, -1)
    documents = Documents(positions, BOUNDARIES.expand(2, -1)) if is_packed else None
    results = []
    for logits_at_once in (1 << 20, 64 * 4):
        monkeypatch.setattr(chunked_loss, "LOGITS_AT_ONCE", logits_at_once)
        model.zero_grad()
        losses = models.losses(model, tokens, targets, 0.0, documents, torch.tensor(11.0))
        losses.cross_entropy.backward()
        results.append([losses.cross_entropy, *(param.grad for param in model.parameters())])
    assert huggingface.chunked_vocabulary(model) == 64 and huggingface.chunked_vocabulary(model.eval()) == 0
    torch.testing.assert_close(results[1], results[0])


def test_sources_of_one_name_have_numbers() -> None:
    settings = replace(TrainSettings(), data=("/a/train.jsonl", "/b/train.jsonl", "/c/web"))
    names = [source_name(settings, Path(path)) for path in (*settings.data[:2], "/c/web/part-1", "/d")]
    assert names == ["train.jsonl-1", "train.jsonl-2", "web", "text"]
