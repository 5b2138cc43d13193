"use strict";
const byId = (id) => document.getElementById(id);
const text = byId("text"), partial = byId("partial"), status = byId("status");
const drop = byId("drop"), chosen = byId("file"), speak = byId("speak");
let recording = null;

const time = (seconds) => new Date(1000 * seconds).toISOString().slice(11, 19);

function clear(message) {
  text.replaceChildren();
  partial.textContent = "";
  status.textContent = message;
  status.className = "";
}

function fail(message) {
  status.textContent = message;
  status.className = "error";
  partial.textContent = "";
}

function add(segment) {
  if (!segment.text) return;
  const line = document.createElement("p"), when = document.createElement("time");
  when.textContent = time(segment.start);
  line.append(when, " ", segment.text);
  text.append(line);
  line.scrollIntoView({block: "nearest"});
}

async function* linesOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) yield JSON.parse(line);
  }
}

async function transcribe(file) {
  clear(`Transcribing ${file.name} …`);
  const form = new FormData();
  form.append("file", file);
  try {
    const response = await fetch("transcribe?format=jsonl", {method: "POST", body: form});
    if (!response.ok) return fail((await response.json()).error);
    for await (const line of linesOf(response)) {
      if (line.error) return fail(line.error);
      if (line.segment) add(line.segment);
      else status.textContent = `${file.name}: ${line.seconds.toFixed(1)} s of audio`;
    }
  } catch (error) {
    fail(`The server does not answer: ${error.message}`);
  }
}

async function record() {
  clear("Listening …");
  const stream = await navigator.mediaDevices.getUserMedia({audio: {channelCount: 1}});
  const context = new AudioContext();
  await context.audioWorklet.addModule("microphone.js");
  const address = new URL(`live?rate=${context.sampleRate}`, location.href);
  address.protocol = address.protocol.replace("http", "ws");
  const socket = new WebSocket(address);
  const microphone = new AudioWorkletNode(context, "microphone");
  const release = () => {
    stream.getTracks().forEach((track) => track.stop());
    if (context.state !== "closed") context.close();
    recording = null;
    speak.textContent = "Speak";
  };
  socket.onmessage = ({data}) => {
    const update = JSON.parse(data);
    if (update.error) return fail(update.error);
    update.final.forEach(add);
    partial.textContent = update.partial;
    if (update.end) status.textContent = "Stopped";
  };
  socket.onclose = release;
  socket.onerror = () => fail("The connection to the server failed.");
  microphone.port.onmessage = ({data}) => {
    if (recording && socket.readyState === WebSocket.OPEN) socket.send(data);
  };
  context.createMediaStreamSource(stream).connect(microphone);
  speak.textContent = "Stop";
  recording = () => {
    release();
    if (socket.readyState === WebSocket.OPEN) socket.send("end");
  };
}

chosen.onchange = () => chosen.files.length && transcribe(chosen.files[0]);
drop.ondragover = (event) => event.preventDefault();
drop.ondrop = (event) => {
  event.preventDefault();
  if (event.dataTransfer.files.length) transcribe(event.dataTransfer.files[0]);
};
speak.onclick = () => (recording ? recording() : record().catch((error) => fail(`No microphone: ${error.message}`)));
fetch("health").then((response) => response.json()).then((health) => (byId("model").textContent = health.model));
