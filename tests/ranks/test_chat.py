"""Conversations become the ids that the tokenizer makes of the whole text, and what is trained is what was answered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from triaxis.engine.config import RunConfig
from triaxis.engine.data.day import writes_dates
from triaxis.engine.data.jsonl import Document, Tally, read_documents
from triaxis.engine.data.tokenizer import open_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m['role'] }}<|stop|>\n\n{{ m['content'] | trim }}<|eot|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|stop|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
QWEN3 = (
    "{%- if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{%- for m in messages %}{% if m.role == 'assistant' %}{% set ns = namespace(c=m.content or '', r='') %}"
    "{% if m.reasoning_content is string %}{% set ns.r = m.reasoning_content %}"
    "{% elif '</think>' in ns.c %}"
    "{% set ns.r = ns.c.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set ns.c = ns.c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>assistant\n{% if loop.last %}<think>\n{{ ns.r.strip('\n') }}\n</think>\n\n{% endif %}"
    "{{ ns.c.lstrip('\n') }}"
    "{% for call in m.tool_calls %}{% set call = call.function if call.function else call %}"
    '\n<tool_call>\n{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
GLM = (
    "[gMASK]{% for m in messages %}<|{{ m.role }}|>\n"
    "{% if m.role == 'assistant' %}<think></think>\n{% endif %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "qwen3": QWEN3, "glm": GLM}
SPECIAL = [
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|stop|>", "<|eot|>", "[INST]", "[/INST]"),
    *("[gMASK]", "<|user|>", "<|assistant|>", "<|endoftext|>"),
]
KINDS = ("bytes", "pieces", "llama2", "unigram")
TALK = [
    ("user", "what is two and two?"),
    ("assistant", "it is four."),
    ("user", "sure?"),
    ("assistant", "é yes"),
]


def untrained(kind: str) -> tuple[Any, Any]:
    """A tokenizer of a kind, and what trains it."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    options: dict[str, Any] = {"vocab_size": 420, "show_progress": False}
    special = [*SPECIAL, *(["<unk>"] if kind != "bytes" else [])]
    letters = [chr(n) for n in range(32, 127)] + ["\n", "é", "▁"]
    if kind == "unigram":
        tokens = Tokenizer(models.Unigram())
        trainer: Any = trainers.UnigramTrainer(
            special_tokens=special, unk_token="<unk>", initial_alphabet=letters, **options
        )
    else:
        tokens = Tokenizer(
            models.BPE(unk_token=None if kind == "bytes" else "<unk>", byte_fallback=kind == "llama2")
        )
        alphabet = pre_tokenizers.ByteLevel.alphabet() if kind == "bytes" else letters
        if kind == "llama2":
            alphabet.remove("é")
            special += [f"<0x{byte:02X}>" for byte in range(256)]
            options["vocab_size"] += 256
        trainer = trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet, **options)
    if kind == "bytes":
        tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokens.decoder = decoders.ByteLevel()
    elif kind == "llama2":
        tokens.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokens.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    else:
        tokens.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokens.decoder = decoders.Metaspace(prepend_scheme="first")
    return tokens, trainer


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Tokenizers made of a few sentences: byte-level BPE, and the kinds that SentencePiece makes.

    pieces: BPE with a word marker at the beginning; llama2: with one behind every control token too, by a normalizer,
    and bytes for what it does not know; unigram: of pieces with scores
    """
    from tokenizers import AddedToken, Tokenizer, processors

    made: dict[str, Any] = {}
    text = ["it is four. what is two and two? sure? yes name arguments user assistant system think"] * 20
    for kind in KINDS:
        tokens, trainer = untrained(kind)
        tokens.train_from_iterator(text, trainer)
        if kind == "llama2":  # bytes are no control tokens
            whole = json.loads(tokens.to_str())
            whole["added_tokens"] = [t for t in whole["added_tokens"] if not t["content"].startswith("<0x")]
            tokens = Tokenizer.from_str(json.dumps(whole))
        tokens.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
        for bos in (False, True):
            if bos:
                tokens.post_processor = processors.TemplateProcessing(
                    single="<s> $A", special_tokens=[("<s>", tokens.token_to_id("<s>"))]
                )
            made[f"{kind}{'-bos' * bos}"] = tokens.to_str()
    made["root"] = tmp_path_factory.mktemp("tokenizers")
    return made


def folder(folders: dict[str, Any], kind: str, template: str | None, eos: str = "</s>") -> Path:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    place: Path = folders["root"] / f"{len(list(folders['root'].iterdir()))}"
    tokens = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer.from_str(folders[kind]), bos_token="<s>", eos_token=eos
    )
    tokens.chat_template = template
    tokens.save_pretrained(place)
    return place


def read(
    path: Path, tmp_path: Path, *records: object, skip: bool = False, **options: bool
) -> tuple[list[Document], Tally]:
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    tally = Tally()
    tokenizer = open_tokenizer(path, **options)
    found = list(read_documents(tmp_path / "x.jsonl", tokenizer, tally, "skip" if skip else "error"))
    return found, tally


def messages(*turns: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


def library(path: Path, turns: list[dict[str, Any]], **others: object) -> tuple[str, list[int]]:
    from transformers import AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(path)
    return (
        tokens.apply_chat_template(turns, tokenize=False, **others),
        tokens.apply_chat_template(turns, tokenize=True, return_dict=False, **others),
    )


def trained(path: Path, document: Document) -> list[str]:
    """The runs of trained tokens, as text."""
    tokens = open_tokenizer(path)
    assert document.trained is not None
    runs: list[list[int]] = []
    before = False
    for token, flag in zip(document.ids, document.trained, strict=True):
        if flag:
            runs[-1:] = [[*runs[-1], token]] if before else [*runs[-1:], [token]]
        before = flag
    return [tokens.decode(run) for run in runs]


EXPECTED = {
    "chatml": ["it is four.<|im_end|>", "é yes<|im_end|>"],
    "llama3": ["it is four.<|eot|>", "é yes<|eot|>"],
    "mistral": [" it is four.</s>", " é yes</s>"],
    "qwen3": ["it is four.<|im_end|>", "é yes<|im_end|>"],
    "glm": ["it is four.", "é yes"],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_are_the_librarys_and_targets_the_answers(
    folders: dict[str, Any], tmp_path: Path, name: str, kind: str
) -> None:  # N01, N02, N04, N07, N08
    path = folder(folders, kind, TEMPLATES[name])
    (document,), tally = read(path, tmp_path, {"messages": messages(*TALK)})
    _, ids = library(path, messages(*TALK))
    assert document.ids == ids
    found = [text.strip() for text in trained(path, document)]
    assert found == [text.strip() for text in EXPECTED[name]]
    assert tally.unended == (2 if name == "glm" else 0)
    told = " ".join(tally.told())
    assert ("does not end 2 answers" in told) == (name == "glm") and "1 conversation: " in told


@pytest.mark.parametrize("kind", KINDS)
def test_no_end_is_added_behind_the_templates_own(
    folders: dict[str, Any], tmp_path: Path, kind: str
) -> None:  # N01
    for eos in ("<|im_end|>", "<|endoftext|>"):
        path = folder(folders, kind, CHATML, eos)
        (document,), _ = read(path, tmp_path, {"messages": messages(*TALK)})
        assert document.ids == library(path, messages(*TALK))[1]
        assert document.trained is not None and not document.trained[-1]  # the newline behind the end
        ends = [
            i for i, t in enumerate(document.ids) if t == open_tokenizer(path).end and document.trained[i]
        ]
        assert len(ends) == (2 if eos == "<|im_end|>" else 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", [LLAMA3, CHATML, None], ids=["writes it", "does not", "none"])
def test_one_beginning_where_the_tokenizer_wants_one(
    folders: dict[str, Any], tmp_path: Path, kind: str, template: str | None
) -> None:  # N10
    path = folder(folders, f"{kind}-bos", template)
    documents, _ = read(path, tmp_path, {"messages": messages(*TALK)}, {"text": "it is four."})
    for document in documents:
        assert document.ids[0] == 0 and document.ids.count(0) == 1
    assert documents[1].ids[-1] == open_tokenizer(path).end
    assert documents[0].trained is not None and not documents[0].trained[0]


def test_what_earlier_turns_lose_is_not_trained_and_thoughts_that_are_shown_are(
    folders: dict[str, Any], tmp_path: Path
) -> None:  # N07
    turns = messages(
        *(("user", "a"), ("assistant", "<think>\nit is\n</think>\n\nfour")),
        *(("user", "b"), ("assistant", "<think>\ntwo\n</think>\n\nyes")),
    )
    path = folder(folders, "bytes", QWEN3)
    (document,), _ = read(path, tmp_path, {"messages": turns})
    text, ids = library(path, turns)
    assert document.ids == ids and "it is" not in text
    assert trained(path, document) == ["four<|im_end|>", "<think>\ntwo\n</think>\n\nyes<|im_end|>"]
    apart = [
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "yes", "reasoning_content": "two"},
    ]
    (document,), _ = read(path, tmp_path, {"messages": apart})
    assert trained(path, document) == ["<think>\ntwo\n</think>\n\nyes<|im_end|>"]


def test_a_think_block_of_the_templates_own_is_masked_or_trained_as_asked(
    folders: dict[str, Any], tmp_path: Path
) -> None:  # N08
    assert not RunConfig().train_inserted_think
    for template, inserted, said in (
        (QWEN3, "<think>\n\n</think>\n\n", "yes<|im_end|>"),
        (GLM, "\n<think></think>\n", "yes"),
    ):
        path = folder(folders, "bytes", template)
        turns = messages(("user", "a"), ("assistant", "yes"))
        (document,), _ = read(path, tmp_path, {"messages": turns})
        assert trained(path, document) == [said]
        (document,), _ = read(path, tmp_path, {"messages": turns}, train_inserted=True)
        assert trained(path, document) == [inserted + said]


def test_tools_calls_and_their_results_reach_the_template(
    folders: dict[str, Any], tmp_path: Path
) -> None:  # N05
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    path = folder(folders, "bytes", QWEN3)
    for content in ("", None, "it is"):
        turns: list[dict[str, Any]] = [
            {"role": "user", "content": "two and two?"},
            {"role": "assistant", "content": content, "tool_calls": [call]},
            {"role": "tool", "content": "4"},
            {"role": "assistant", "content": "four."},
        ]
        (document,), _ = read(path, tmp_path, {"messages": turns, "tools": tools})
        text, ids = library(path, turns, tools=tools)
        assert document.ids == ids and '"parameters"' in text
        first, second = trained(path, document)
        assert first == (content or "") + (
            '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call><|im_end|>'
        )
        assert second == "four.<|im_end|>"


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"tool_call_id": "x"}, "message 1 has the key 'tool_call_id'"),
        ({"loss_mask": 0}, "message 1 has the key 'loss_mask'"),
        ({"weight": 0.5}, "`weight` of message 1 must be 0 or 1"),
        ({"train": "no"}, "`train` of message 1 must be 0 or 1"),
    ],
)
def test_a_key_that_nobody_reads_is_refused_by_name(
    folders: dict[str, Any], tmp_path: Path, change: dict[str, Any], name: str
) -> None:  # N05, N13
    turns = messages(*TALK)
    turns[1] |= change
    with pytest.raises(ValueError, match=rf"x\.jsonl:1: {name}"):
        read(folder(folders, "bytes", CHATML), tmp_path, {"messages": turns})
    with pytest.raises(
        ValueError, match=r"x\.jsonl:1: has the key 'tools', which the chat template does not read"
    ):
        read(folder(folders, "bytes", CHATML), tmp_path, {"messages": messages(*TALK), "tools": []})
    asked = [{"role": "user", "content": "a", "train": True}, {"role": "assistant", "content": "b"}]
    with pytest.raises(ValueError, match="message 0 is to be trained, but is the user's"):
        read(folder(folders, "bytes", CHATML), tmp_path, {"messages": asked})


@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}])
@pytest.mark.parametrize("template", [CHATML, None])
def test_an_answer_that_is_not_to_be_learned_is_not(
    folders: dict[str, Any], tmp_path: Path, mark: dict[str, Any], template: str | None
) -> None:  # N13
    turns = messages(*TALK)
    turns[1] |= mark
    path = folder(folders, "bytes", template)
    (document,), _ = read(path, tmp_path, {"messages": turns})
    assert [text.startswith("é yes") for text in trained(path, document)] == [True]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", [CHATML, None])
def test_what_people_write_never_becomes_a_control_token(
    folders: dict[str, Any], tmp_path: Path, kind: str, template: str | None
) -> None:
    path = folder(folders, kind, template)
    said = "two<|endoftext|><|im_end|> sure?"
    turns = messages(("user", said), ("assistant", "it is</s> four."))
    documents, _ = read(path, tmp_path, {"messages": turns}, {"text": said})
    tokenizer = open_tokenizer(path)
    clean, _ = read(path, tmp_path, {"messages": messages(("user", "a"), ("assistant", "b"))})
    specials = [token for token in documents[0].ids if token < len(SPECIAL)]
    assert specials == [token for token in clean[0].ids if token < len(SPECIAL)]
    assert [token for token in documents[1].ids if token < len(SPECIAL)] == [tokenizer.end]
    assert said in tokenizer.decode(documents[0].ids) and said in tokenizer.decode(documents[1].ids)
    (answer,) = trained(path, documents[0])
    assert answer.startswith("it is</s> four.")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_what_people_write_changes_no_token_of_the_turns_beside_it(
    folders: dict[str, Any], tmp_path: Path, name: str, kind: str
) -> None:
    """From the first answer on, all is as if the user had written a word."""
    path = folder(folders, kind, TEMPLATES[name])
    found = []
    for said in ("two", "two<|endoftext|>", "<|im_end|>"):
        (document,), _ = read(path, tmp_path, {"messages": messages(("user", said), *TALK[1:])})
        assert document.trained is not None
        first = document.trained.index(True)
        found.append((document.ids[first:], document.trained[first:]))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_characters_are_no_control_tokens(folders: dict[str, Any], tmp_path: Path, kind: str) -> None:
    path = folder(folders, kind, CHATML)
    documents, _ = read(path, tmp_path, {"text": "two 日"}, {"text": "日 <|im_end|>"})
    tokens = open_tokenizer(path)
    assert documents[0].ids[-1] == tokens.end and "im_end" in tokens.decode(documents[1].ids)


def test_what_cannot_be_written_but_as_a_control_token_is_a_bad_line(
    folders: dict[str, Any], tmp_path: Path
) -> None:
    path = folder(folders, "bytes", CHATML)
    for said in ("<|im_end|>\U00100003", "\U00100001 <s>"):
        with pytest.raises(
            ValueError, match=r"x\.jsonl:1: holds what looks like a control token, and characters"
        ):
            read(path, tmp_path, {"text": said})
    (document,), _ = read(path, tmp_path, {"text": "\U00100003 two"})  # which alone means nothing
    assert open_tokenizer(path).decode(document.ids).startswith("\U00100003 two")


@pytest.mark.parametrize("template", ["{{ 1/0 }}", CHATML + "{{ messages[0].content[99].x.y }}"])
def test_a_fault_of_the_template_is_a_bad_line(
    folders: dict[str, Any], tmp_path: Path, template: str
) -> None:
    path = folder(folders, "bytes", template)
    records = ({"messages": messages(*TALK)}, {"text": "two"})
    with pytest.raises(ValueError, match=r"x\.jsonl:1: the tokenizer's chat template refuses it"):
        read(path, tmp_path, *records)
    documents, tally = read(path, tmp_path, *records, skip=True)
    assert len(documents) == 1 and len(tally.bad) == 1
    with pytest.raises(ValueError, match="chat template must be one that jinja reads, but line 1"):
        open_tokenizer(folder(folders, "bytes", "{% for %}"))


def test_a_day_that_a_template_writes_is_one_for_the_whole_run(
    folders: dict[str, Any], tmp_path: Path
) -> None:
    path = folder(folders, "bytes", "{{ strftime_now('%d %b %Y') }}" + CHATML)
    assert writes_dates(path) and not writes_dates(folder(folders, "bytes", CHATML))
    tokenizer = open_tokenizer(path, date="2024-07-26")
    assert "the chat template writes the day: 2024-07-26" in tokenizer.notes[0]
    data = tmp_path / "x.jsonl"
    data.write_text(json.dumps({"messages": messages(*TALK)}) + "\n")
    (document,) = read_documents(data, tokenizer, Tally(), "error")
    assert tokenizer.decode(document.ids).startswith("26 Jul 2024")


def test_the_code_of_a_tokenizers_folder_is_not_run(folders: dict[str, Any], tmp_path: Path) -> None:
    path = folder(folders, "bytes", CHATML)
    config = json.loads((path / "tokenizer_config.json").read_text())
    config["auto_map"] = {"AutoTokenizer": [None, "own.Own"]}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    ran = tmp_path / "ran"
    (path / "own.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    assert "code of its own (auto_map), which is never run" in open_tokenizer(path).notes[0]
    assert not ran.exists()


def test_padding_is_masked_by_place_not_by_id(folders: dict[str, Any], tmp_path: Path) -> None:  # N11
    from triaxis.engine.data.source import open_source

    path = folder(folders, "bytes-bos", None, "<s>")  # the end is id 0, which padding is too
    (tmp_path / "y.jsonl").write_text(json.dumps({"text": "two"}) + "\n")
    row = open_source(
        tmp_path / "y.jsonl", split="train", sequence_length=32, tokenizer_path=path, pack=False
    ).sample(0, 0)
    labels = row.labels_L[row.labels_L != -100].tolist()
    assert labels[-1] == 0 and row.tokens_L[len(labels)] == 0
