"""The official client of OpenAI's API transcribes with the server, and is refused in the API's own terms."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic

import httpx
import numpy as np
import pysubs2
import pytest
from starlette.testclient import TestClient

from starling.speech.serving.app import Service
from starling.speech.serving.guard import Limits
from starling.speech.transcribing.files import load_model
from tests.code_blocks import code_blocks, run_python
from tests.serve.conftest import TONES, close_words, file_of, sung, words_of
from tests.speech.tones import RATE

pytest.importorskip("openai", reason="the client of OpenAI's API is not installed")

from openai import APIError, APIStatusError, NotFoundError, OpenAI
from openai.types import Model
from openai.types.audio import TranscriptionVerbose

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
SILENCE = file_of(np.zeros(2 * RATE))


@pytest.fixture(scope="module")
def openai(server: str) -> Iterator[OpenAI]:
    """A client as a user makes it; the server knows no keys."""
    with OpenAI(base_url=f"{server}/v1", api_key="any", max_retries=0, timeout=120) as made:
        yield made


def test_the_model_is_listed_by_the_name_of_its_folder(openai: OpenAI) -> None:
    """It can be requested by this name, and by the name that many clients always send."""
    (found,) = openai.models.list()
    Model.model_validate(found.to_dict(), strict=True)
    assert (found.id, found.object, found.owned_by) == (TONES.name, "model", "starling")
    assert openai.models.retrieve(TONES.name) == openai.models.retrieve("whisper-1") == found
    with pytest.raises(NotFoundError, match="model 'other' is unknown; this server has 'tones'"):
        openai.models.retrieve("other")


@pytest.mark.parametrize("model", [TONES.name, "whisper-1", ""])
def test_the_text_is_one_line(openai: OpenAI, model: str) -> None:
    """The line has the text of all segments; optional fields with their only possible values change nothing."""
    words = [*words_of(1), *words_of(2)]
    audio = file_of(np.concatenate([sung(words[:3]), sung(words[3:])]))
    said = openai.audio.transcriptions.create(
        model=model, file=("talk.wav", audio), prompt="", temperature=0, stream=False, chunking_strategy="auto"
    )
    assert said.text == " ".join(words)
    assert said.to_dict() == {"text": said.text}


@pytest.mark.parametrize("phrases", ["FADO\nREMI\t5", ["REMI\t5", *["FADO"] * 99]], ids=["text", "list"])
def test_phrases_are_an_extra_field(openai: OpenAI, phrases: str | list[str]) -> None:
    """They are lines of a text, or a list."""
    said = openai.audio.transcriptions.create(
        model="tones",
        file=("talk.wav", file_of(close_words())),
        response_format="verbose_json",
        timestamp_granularities=["word"],
        extra_body={"boost": phrases},
    )
    assert said.text == "DO REMI"
    assert [word.word for word in said.words or ()] == ["DO", "REMI"]


def test_text_and_subtitles_are_plain(openai: OpenAI) -> None:
    """The client returns them as strings."""
    words, create = words_of(3), openai.audio.transcriptions.create
    upload = ("talk.flac", file_of(sung(words, 16_000), 16_000, "FLAC"))
    assert create(model="tones", file=upload, response_format="text") == " ".join(words) + "\n"
    srt = create(model="tones", file=upload, response_format="srt")
    assert pysubs2.SSAFile.from_string(srt, format_="srt")[0].plaintext.split() == words
    vtt = create(model="tones", file=upload, response_format="vtt")
    assert vtt.startswith("WEBVTT\n")
    assert " ".join(words) in vtt


def test_verbose_json_has_words_and_segments_with_the_times_of_the_transcript(
    openai: OpenAI, client: httpx.Client
) -> None:
    """Each field that the client's own types require is there, with the right type."""
    words = [*words_of(1), *words_of(2)]
    audio = file_of(np.concatenate([sung(words[:3]), sung(words[3:])]))
    known = client.post("/transcribe", content=audio).json()
    found = openai.audio.transcriptions.create(
        model="tones",
        file=("talk.wav", audio),
        response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
        language="en",
    )
    TranscriptionVerbose.model_validate(found.to_dict(), strict=True)
    assert (found.text, found.duration, found.language) == (" ".join(words), known["seconds"], "en")
    assert found.segments is not None
    assert found.words is not None
    spoken = [word for segment in known["segments"] for word in segment["words"]]
    assert [(word.word, word.start, word.end) for word in found.words] == [
        (word["text"], word["start"], word["end"]) for word in spoken
    ]
    assert len(found.segments) == 2
    for number, (segment, other) in enumerate(zip(found.segments, known["segments"], strict=True)):
        assert (segment.id, segment.text) == (number, other["text"])
        assert (segment.start, segment.end) == (other["start"], other["end"])
        assert segment.seek == round(100 * segment.start)
        confidence = np.prod([word["confidence"] for word in other["words"]]) ** (1 / len(other["words"]))
        assert np.isclose(np.exp(segment.avg_logprob), confidence)
        assert load_model(TONES).recogniser.tokenizer.decode(segment.tokens) == segment.text


@pytest.mark.parametrize(
    ("asked", "has_segments", "has_words"),
    [([], True, False), (["segment"], True, False), (["word"], False, True)],
)
def test_only_the_requested_granularities_are_returned(
    openai: OpenAI, asked: list[str], has_segments: bool, has_words: bool
) -> None:
    """The default is segments. Without `language`, the language is `und`."""
    found = openai.audio.transcriptions.create(
        model="tones",
        file=("talk.wav", file_of(sung(["DO"]))),
        response_format="verbose_json",
        timestamp_granularities=asked,  # type: ignore[arg-type]
    )
    assert (found.segments is not None, found.words is not None) == (has_segments, has_words)
    assert found.language == "und"


def test_a_stream_grows_to_the_whole_text(openai: OpenAI) -> None:
    """Its first event comes before the end of a recording that is decoded in several turns."""
    audio = file_of(np.tile(sung(words_of(0, 40)), 4))
    whole = openai.audio.transcriptions.create(model="tones", file=("talk.wav", audio)).text
    *deltas, done = openai.audio.transcriptions.create(model="tones", file=("talk.wav", audio), stream=True)
    assert len(deltas) > 1
    assert {event.type for event in deltas} == {"transcript.text.delta"}
    assert "".join(event.delta for event in deltas if event.type == "transcript.text.delta") == whole
    assert (done.type, done.to_dict()["text"]) == ("transcript.text.done", whole)


def test_an_error_in_the_middle_of_a_stream_is_its_last_event(openai: OpenAI) -> None:
    """The recording turns out to be too long; the client raises the error."""
    audio = file_of(np.tile(sung(words_of(0, 40)), 20), form="FLAC")
    stream = openai.audio.transcriptions.create(model="tones", file=("talk.flac", audio), stream=True)
    assert next(iter(stream)).type == "transcript.text.delta"
    with pytest.raises(APIError, match="longer than 6 minutes"):
        list(stream)


def test_silence_has_no_text(openai: OpenAI) -> None:
    """This holds for every format."""
    create, upload = openai.audio.transcriptions.create, ("silence.wav", SILENCE)
    assert create(model="tones", file=upload).text == ""
    assert create(model="tones", file=upload, response_format="text") == "\n"
    assert create(model="tones", file=upload, response_format="srt") == ""
    assert create(model="tones", file=upload, response_format="vtt") == "WEBVTT\n"
    found = create(
        model="tones",
        file=upload,
        response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
    )
    TranscriptionVerbose.model_validate(found.to_dict(), strict=True)
    assert (found.text, found.duration, found.segments, found.words) == ("", 2.0, [], [])
    (done,) = create(model="tones", file=upload, stream=True)
    assert done.to_dict() == {"type": "transcript.text.done", "text": ""}


@pytest.mark.parametrize(
    ("asked", "status", "parameter", "message"),
    [
        ({"response_format": "docx"}, 400, "response_format", "'json', 'text', 'srt', 'verbose_json' or 'vtt', got 'd"),
        ({"model": "whisper-2"}, 404, "model", "model 'whisper-2' is unknown; this server has 'tones', also by the na"),
        ({"prompt": "DO RE"}, 400, "prompt", "prompt: this server does not support it; leave it out, got 'DO RE'"),
        ({"temperature": 0.4}, 400, "temperature", "temperature: this server does not support it; leave it out, got '"),
        ({"extra_body": {"temperature": "warm"}}, 400, "temperature", "unable to parse string as a number, got 'warm'"),
        ({"extra_body": {"boost": "DO\nRe"}}, 400, "boost", "boost, line 2: 'Re' has the character 'e' (U+0065)"),
        ({"extra_body": {"boost": "DO " * 7000}}, 400, "boost", "phrases of at most 20000 characters, got 21000"),
        ({"include": ["logprobs"]}, 400, "include", "include: unknown key; known are model, language, prompt"),
        ({"extra_body": {"languages": "en"}}, 400, "languages", "did you mean language?"),
        ({"stream": True, "response_format": "srt"}, 400, "stream", "stream: needs response_format json, got srt"),
        ({"timestamp_granularities": ["word"]}, 400, "timestamp_granularities", "needs response_format verbose_json"),
        (
            {"timestamp_granularities": ["word", "letter"], "response_format": "verbose_json"},
            *(400, "timestamp_granularities", "input should be 'word' or 'segment', got 'letter'"),
        ),
        ({"file": ("page.html", b"<html>")}, 400, None, "page.html: cannot be read as audio"),
        ({"file": ("page.html", b"<html>"), "stream": True}, 400, None, "page.html: cannot be read as audio"),
        ({"file": ("no.wav", file_of(np.zeros(0)))}, 400, None, "no.wav"),
        ({"file": ("empty.wav", b"")}, 400, None, "empty.wav: cannot be read as audio"),
        ({"file": ("long.flac", file_of(np.zeros(7 * 60 * RATE), form="FLAC"))}, 400, None, "longer than 6 minutes"),
        ({"file": ("large.wav", b"x" * 10_000_001)}, 413, None, "larger than 10 MB (--max-megabytes)"),
        ({"extra_headers": {"Origin": "http://elsewhere.org"}}, 403, None, "elsewhere.org may not use this server"),
    ],
)
def test_wrong_requests_are_refused_as_in_the_api(
    openai: OpenAI, asked: dict[str, object], status: int, parameter: str | None, message: str
) -> None:
    """The client's error has the status, the message and the parameter."""
    with pytest.raises(APIStatusError) as refused:
        openai.audio.transcriptions.create(**({"model": "tones", "file": ("silence.wav", SILENCE)} | asked))  # type: ignore[call-overload]
    error = refused.value
    assert (error.status_code, error.param, error.type) == (status, parameter, "invalid_request_error")
    assert error.code == ("model_not_found" if status == 404 else None)
    assert isinstance(error.body, dict)
    assert message in error.body["message"]


@pytest.mark.parametrize(
    ("method", "path", "upload", "status", "message"),
    [
        ("POST", "audio/translations", {}, 404, "Not Found"),
        ("GET", "audio/transcriptions", {}, 405, "Method Not Allowed"),
        ("POST", "audio/transcriptions", {"content": b""}, 400, "the request has no audio"),
        ("POST", "audio/transcriptions", {"files": {"file": ""}, "data": {"model": "tones"}}, 400, "cannot be read"),
        ("POST", "audio/transcriptions", {"data": {"model": "tones"}}, 400, "cannot be read as audio"),
        ("POST", "audio/transcriptions", {"content": (b"x" * 1_000_000 for _ in range(11))}, 413, "larger than 10 MB"),
    ],
)
def test_other_requests_are_refused_in_the_same_shape(
    client: httpx.Client, method: str, path: str, upload: dict[str, object], status: int, message: str
) -> None:
    """They may be refused before the upload, by its route, or during it."""
    answer = client.request(method, f"/v1/{path}", **upload)  # type: ignore[arg-type]
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert message in answer.json()["error"]["message"]


def test_the_documents_program_runs(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It runs as printed on the page, except for the address and the name of the model."""
    (program,) = [block.text for block in code_blocks(PAGE) if block.language == "python"]
    (tmp_path / "hello.wav").write_bytes(file_of(sung(["DO", "RE"])))
    monkeypatch.chdir(tmp_path)
    run_python(program.replace("http://127.0.0.1:8000", server).replace('"demo"', '"tones"'))
    text, *words = capsys.readouterr().out.splitlines()
    assert text == "DO RE"
    assert [line.split()[-1] for line in words] == ["DO", "RE"]


def test_a_busy_server_answers_between_the_turns_of_others(openai: OpenAI, client: httpx.Client) -> None:
    """No client is refused, and a short file does not wait for the end of a long one that came first."""
    long = file_of(np.tile(sung(words_of(0, 40)), 14))

    def ask(number: int) -> tuple[str, float]:
        content = long if number == 0 else file_of(sung(words_of(number)))
        return openai.audio.transcriptions.create(model="tones", file=("talk.wav", content)).text, monotonic()

    with ThreadPoolExecutor(7) as pool:
        first = pool.submit(ask, 0)
        while client.get("/health").json()["waiting"] == 0:
            assert not first.done()
        others = list(pool.map(ask, range(1, 7)))
        _, ended = first.result()
    assert [text.split() for text, _ in others] == [words_of(number) for number in range(1, 7)]
    assert sum(at < ended for _, at in others) >= 4  # the clocks of the clients run a little late


def test_a_model_without_word_times_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """This is so if words are requested; segments have the times of their speech, and no confidence."""
    transcriber = load_model(TONES)
    monkeypatch.setattr(transcriber.recogniser, "states", object())
    with ThreadPoolExecutor(1) as decoding:
        service = Service(transcriber, str(TONES), Limits(1_000_000, 60.0, 30.0), decoding)
        with TestClient(service.app(False)) as client:
            upload = {"files": {"file": ("talk.wav", file_of(sung(["DO", "RE"])))}}
            form = {"response_format": "verbose_json", "timestamp_granularities[]": "word"}
            refused = client.post("/v1/audio/transcriptions", data=form, **upload)
            assert refused.status_code == 400
            assert refused.json()["error"]["message"] == "this model gives no word times; ask for segments only"
            refused = client.post("/v1/audio/transcriptions", data={"boost": "DO"}, **upload)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "boost")
            assert "this model's texts are from tied states" in refused.json()["error"]["message"]
            answer = client.post("/v1/audio/transcriptions", data={"response_format": "verbose_json"}, **upload).json()
    TranscriptionVerbose.model_validate(answer, strict=True)
    (segment,) = answer["segments"]
    assert (segment["text"], segment["avg_logprob"]) == ("DO RE", 0.0)
    assert 0 <= segment["start"] < segment["end"] <= answer["duration"]


def test_a_fault_of_the_server_is_reported_in_the_same_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer has nothing else: the traceback is for the log."""
    with ThreadPoolExecutor(1) as decoding:
        service = Service(load_model(TONES), str(TONES), Limits(1_000_000, 60.0, 30.0), decoding)
        app = service.app(False)
        monkeypatch.setattr(service, "_transcriber", None)
        with TestClient(app, raise_server_exceptions=False) as client:
            upload = {"files": {"file": ("talk.wav", SILENCE)}}
            failed = client.post("/v1/audio/transcriptions", **upload)
            assert (failed.status_code, failed.json()["error"]["type"]) == (500, "server_error")
            assert failed.json()["error"]["message"] == "the server failed; its log says why"
            assert client.post("/transcribe", **upload).json() == {"error": "the server failed; its log says why"}
