"""The server answers files and live audio, refuses what is wrong in one message, and serves all clients in turn."""

import asyncio
import json
import multiprocessing
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic
from urllib.parse import urlsplit

import httpx
import numpy as np
import pysubs2
import pytest
from starlette.types import Message, Receive, Scope, Send
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from starling.errors import ConfigError
from starling.speech.serving.app import serve
from starling.speech.serving.guard import Guard, Limits
from tests.serve.conftest import STALL, TONES, close_words, file_of, sung, words_of
from tests.speech.tones import RATE


def test_it_is_healthy_and_shows_a_page(client: httpx.Client) -> None:
    """The page loads nothing from elsewhere."""
    assert client.get("/health").json() == {"status": "ok", "model": str(TONES), "rate": RATE, "waiting": 0}
    page = client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert client.get("/page.js").status_code == client.get("/microphone.js").status_code == 200
    assert client.get("/other.js").json() == {"error": "no page /other.js"}


def test_a_file_is_transcribed_in_every_format(client: httpx.Client) -> None:
    """The file is sent as a form or as the body, at any rate and of any kind, including raw PCM."""
    words = words_of(1)
    audio = file_of(sung(words, 16_000), 16_000, "FLAC")
    form = {"file": ("my talk.flac", audio)}
    found = client.post("/transcribe", files=form).json()
    assert (found["file"], found["text"].split()) == ("my talk.flac", words)
    assert [word["text"] for segment in found["segments"] for word in segment["words"]] == words
    assert client.post("/transcribe?format=txt", content=audio).text.split() == words
    raw = (32767 * sung(words)).astype("<i2").tobytes()
    assert client.post(f"/transcribe?format=txt&raw_pcm={RATE}", content=raw).text.split() == words
    srt = client.post("/transcribe?format=srt", files=form)
    assert srt.headers["content-type"].startswith("application/x-subrip")
    assert pysubs2.SSAFile.from_string(srt.text, format_="srt")[0].plaintext.split() == words
    assert client.post("/transcribe?format=vtt", files=form).text.startswith("WEBVTT\n")
    ctm = client.post("/transcribe?format=ctm", files=form).text.splitlines()
    assert [line.split()[0] for line in ctm] == ["my_talk"] * 3
    *segments, whole = client.post("/transcribe?format=jsonl", files=form).text.splitlines()
    assert " ".join(json.loads(line)["segment"]["text"] for line in segments).split() == words
    assert json.loads(whole)["text"].split() == words


def test_a_file_with_less_audio_than_declared_is_answered_with_a_note(client: httpx.Client) -> None:
    """In JSON, which has a place for it."""
    whole = file_of(sung(words_of(1)))
    cut = whole[: round(0.95 * len(whole))]
    note = "talk.wav: 5.0% of the audio that its header declares is missing; the rest is used"
    upload = {"file": ("talk.wav", cut)}
    assert client.post("/transcribe", files=upload).json()["note"] == note
    *_, last = client.post("/transcribe?format=jsonl", files=upload).text.splitlines()
    assert json.loads(last)["note"] == note
    form = {"response_format": "verbose_json"}
    assert client.post("/v1/audio/transcriptions", files=upload, data=form).json()["note"] == note
    assert "note" not in client.post("/transcribe", files={"file": ("talk.wav", whole)}).json()


@pytest.mark.parametrize(("form", "codec", "rate"), [("ipod", "aac", 16_000), ("webm", "libopus", 48_000)])
def test_recordings_of_telephones_and_browsers_are_transcribed(
    client: httpx.Client, tmp_path: Path, form: str, codec: str, rate: int
) -> None:
    """This needs FFmpeg."""
    pytest.importorskip("av", reason="the extra [media] is not installed")
    from tests.speech.media import write_media

    words = words_of(2)
    audio = write_media(tmp_path / "talk", form, codec, sung(words, rate)[None].astype(np.float32), rate).read_bytes()
    assert client.post("/transcribe", files={"file": ("talk", audio)}).json()["text"].split() == words
    assert client.post("/transcribe?format=txt", content=audio).text.split() == words


@pytest.mark.parametrize("asked", [{"params": {"boost": "FA\nREMI\t5"}}, {"data": {"boost": "# names\r\nREMI\t5\r\n"}}])
def test_phrases_of_a_request_are_boosted(client: httpx.Client, asked: dict[str, dict[str, str]]) -> None:
    """They apply to this request only, and come in its query or in a field of its form."""
    upload = {"files": {"file": ("talk.wav", file_of(close_words()))}}
    assert client.post("/transcribe?format=txt", **upload).text == "DO RE MI\n"
    found = client.post("/transcribe", **upload, **asked).json()
    assert found["text"] == "DO REMI"
    assert [word["text"] for segment in found["segments"] for word in segment["words"]] == ["DO", "REMI"]
    assert client.post("/transcribe?format=txt", **upload).text == "DO RE MI\n"


NOT_AUDIO = {"file": ("page.html", b"<html>")}
FORM = {"Content-Type": "multipart/form-data; boundary=x"}


@pytest.mark.parametrize(
    ("query", "upload", "code", "message"),
    [
        ("", {"files": NOT_AUDIO}, 400, "page.html: cannot be read as audio: libsndfile does not know its format"),
        ("", {"content": b"RIFF\x24\x00\x00\x00WAVEfmt "}, 400, "upload: cannot be read as audio"),
        ("", {"content": file_of(sung(["DO"]))[:3000]}, 400, "upload: truncated"),
        ("", {"content": b""}, 400, "the request has no audio"),
        ("", {"files": {"file": ("empty.wav", b"")}}, 400, "empty.wav: cannot be read as audio"),
        ("", {"content": b"garbage", "headers": FORM}, 400, "Invalid multipart data."),
        ("", {"content": b"--x\r\nContent-Dis", "headers": FORM}, 400, "the form has no file"),
        ("", {"data": {"text": "hello"}, "files": {}}, 400, "cannot be read as audio"),
        ("?format=doc", {"content": b"x"}, 400, "format 'doc' is unknown; known are txt, json, srt, vtt, ctm, jsonl"),
        ("?raw_pcm=fast", {"content": b"xx"}, 400, "raw_pcm 'fast' is not a sampling rate"),
        ("?raw_pcm=1", {"content": b"xx"}, 400, "a sampling rate of 1 Hz is impossible"),
        ("?raw_pcm=8000", {"content": b"x" * 801}, 400, "ends within a sample"),
        ("?boost=DO%0AReMI", {"content": b"xx"}, 400, "boost, line 2: 'ReMI' has the character 'e' (U+0065), which"),
        ("?boost=DO%09x", {"content": b"xx"}, 400, "boost, line 1: write PHRASE, or PHRASE<tab>WEIGHT"),
        ("", {"data": {"boost": "A" * 20_001}, "files": NOT_AUDIO}, 400, "at most 20000 characters, got 20001"),
        ("?format=jsonl", {"files": NOT_AUDIO}, 400, "page.html: cannot be read as audio"),
        ("", {"content": b"x" * 10_000_001}, 413, "larger than 10 MB (--max-megabytes)"),
        ("", {"content": (b"x" * 1_000_000 for _ in range(11))}, 413, "larger than 10 MB (--max-megabytes)"),
        ("", {"content": file_of(np.zeros(7 * 60 * 8000), 8000, "FLAC")}, 400, "longer than 6 minutes"),
        ("", {"content": b"x", "headers": {"Origin": "http://elsewhere.org"}}, 403, "elsewhere.org may not use this"),
        ("", {"content": b"x", "headers": {"Host": "elsewhere.org"}}, 403, "'elsewhere.org' is not this machine"),
    ],
)
def test_wrong_requests_are_refused_in_one_message(
    client: httpx.Client, query: str, upload: dict[str, object], code: int, message: str
) -> None:
    """The status is in the 400s, and the server answers the next client."""
    answer = client.post(f"/transcribe{query}", **upload)  # type: ignore[arg-type]
    assert answer.status_code == code, answer.text
    assert set(answer.json()) == {"error"}
    assert message in answer.json()["error"]
    assert client.get("/health").json()["waiting"] == 0


def test_a_wrong_method_is_refused(client: httpx.Client) -> None:
    """A form must be posted."""
    assert client.get("/transcribe").status_code == 405


def test_a_client_that_stalls_is_cut_off_and_keeps_no_other_waiting(server: str, client: httpx.Client) -> None:
    """It is cut off in the middle of an upload, with status 408."""
    address = urlsplit(server)
    with socket.create_connection((address.hostname, address.port), timeout=30) as stalled:
        begin = monotonic()
        head = f"POST /transcribe HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Length: 5000\r\n\r\n"
        stalled.sendall(head.encode() + b"x" * 100)
        assert client.post("/transcribe?format=txt", content=file_of(sung(["MI"]))).text == "MI\n"
        answer = b"".join(iter(lambda: stalled.recv(4096), b"")).decode()
        assert monotonic() - begin >= STALL
    assert answer.startswith("HTTP/1.1 408 ")
    assert answer.endswith('{"error":"no data for 1 s"}')


def test_a_client_that_waits_for_its_answer_does_not_stall() -> None:
    """During a response that is streamed for longer than the limit, the server still checks whether the client has
    gone."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(receive(), 0.2)
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def ask() -> list[Message]:
        sent: list[Message] = []
        messages: asyncio.Queue[Message] = asyncio.Queue()
        for is_last in (False, True):
            messages.put_nowait({"type": "http.request", "body": b"x", "more_body": not is_last})

        async def send(message: Message) -> None:
            sent.append(message)

        guard = Guard(answer, Limits(1_000_000, 60.0, 0.05), False)
        await guard({"type": "http", "path": "/transcribe", "headers": []}, messages.get, send)
        return sent

    assert [message["status"] for message in asyncio.run(ask())] == [200]


@pytest.mark.wide
def test_fifty_clients_are_served_in_turn(client: httpx.Client) -> None:
    """Each gets its own text, and none waits for a long recording that came first."""
    long = file_of(np.tile(sung(words_of(0, 40)), 14))

    def ask(number: int) -> tuple[list[str], float]:
        content = long if number == 0 else file_of(sung(words_of(number)))
        answer = client.post("/transcribe?format=txt", content=content)
        assert answer.status_code == 200, answer.text
        return answer.text.split(), monotonic()

    with ThreadPoolExecutor(51) as pool:
        first = pool.submit(ask, 0)
        while client.get("/health").json()["waiting"] == 0:
            assert not first.done()
        others = list(pool.map(ask, range(1, 51)))
        text, ended = first.result()
    assert [words for words, _ in others] == [words_of(number) for number in range(1, 51)]
    assert sum(at < ended for _, at in others) >= 45  # the clocks of the clients run a little late
    assert len(text) > 500


def live_address(server: str, rate: object = RATE) -> str:
    return f"{server.replace('http', 'ws')}/live?rate={rate}"


def test_phrases_are_boosted_while_they_are_spoken(server: str) -> None:
    """They are boosted in partial and final texts."""
    data, finals, partials = (32767 * close_words()).astype("<i2").tobytes(), [], []
    with connect(f"{live_address(server)}&boost=REMI%095") as client:
        for place in range(0, len(data), 1600):
            client.send(data[place : place + 1600])
        client.send("end")
        for message in client:
            update = json.loads(message)
            finals += [segment["text"] for segment in update["final"]]
            partials.append(update["partial"])
    assert finals == ["DO REMI"]
    assert "DO REMI" in partials


def test_live_audio_is_transcribed_while_it_is_spoken(server: str) -> None:
    """Partial texts grow, final ones come at pauses, and the rest at the end; odd messages may cut a sample in two."""
    words = [*words_of(1), *words_of(2)]
    samples = np.concatenate([sung(words[:3]), sung(words[3:])])
    data, finals, partials = (32767 * samples).astype("<i2").tobytes(), [], []
    with connect(live_address(server)) as client:
        for place in range(0, len(data), 1601):
            client.send(data[place : place + 1601])
        client.send("end")
        for message in client:
            update = json.loads(message)
            finals += update["final"]
            partials.append(update["partial"])
    assert update["end"] is True
    assert " ".join(segment["text"] for segment in finals).split() == words
    assert len(finals) == 2
    assert finals[1]["start"] > finals[0]["end"]
    assert words[0] in partials or " ".join(words[:2]) in partials


@pytest.mark.parametrize(
    ("rate", "message", "error"),
    [
        ("", None, "say the sampling rate"),
        ("7", None, "a sampling rate of 7 Hz is impossible"),
        (f"{RATE}&boost=si", None, "boost, line 1: 'si' has the character 's'"),
        (RATE, "hello", "send binary messages"),
        (RATE, None, "no audio for 1 s"),
    ],
)
def test_live_audio_that_is_wrong_or_stalls_is_refused(
    server: str, rate: object, message: str | bytes | None, error: str
) -> None:
    """One message is sent before the connection is closed."""
    with connect(live_address(server, rate)) as client:
        if message is not None:
            client.send(message)
        assert error in json.loads(client.recv(timeout=30))["error"]
        with pytest.raises(ConnectionClosed) as closed:
            client.recv(timeout=30)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1008


def test_pages_of_other_sites_cannot_listen(server: str) -> None:
    """A browser reports which page opens a WebSocket."""
    with pytest.raises(InvalidStatus, match="403"), connect(live_address(server), origin="http://elsewhere.org"):  # type: ignore[arg-type]
        pass


def test_a_taken_port_is_named() -> None:
    """The error comes before the model is loaded."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"at 127.0.0.1, port {port}: the port is taken; choose another one"):
            serve(Path("absent"), print, "127.0.0.1", port, False, False, Limits(1, 1.0, 1.0))


@pytest.mark.wide
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_server_cleanly(number: signal.Signals) -> None:
    """This holds even while a client speaks, whose connection is closed."""
    context = multiprocessing.get_context("fork")
    theirs, ours = context.Pipe()
    limits = Limits(1_000_000, 60.0, 30.0)
    process = context.Process(target=serve, args=(TONES, theirs.send, "127.0.0.1", 0, False, False, limits))
    process.start()
    try:
        assert ours.poll(60)
        address = ours.recv().split(" at ")[1].split("/;")[0]
        with connect(live_address(address)) as speaker:
            speaker.send(b"\0" * 1000)
            assert process.pid is not None
            os.kill(process.pid, number)
            with pytest.raises(ConnectionClosed):
                speaker.recv(timeout=30)
        process.join(30)
        assert process.exitcode == 0
        assert ours.recv() == "stopped"
    finally:
        process.kill()
