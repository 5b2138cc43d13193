// Passes the microphone's samples to the page, as 16-bit integers.
class Microphone extends AudioWorkletProcessor {
  constructor() {
    super();
    this.kept = new Int16Array(2048);
    this.size = 0;
  }
  process([input]) {
    for (const sample of input[0] ?? []) {
      this.kept[this.size++] = Math.max(-32768, Math.min(32767, Math.round(sample * 32768)));
      if (this.size === this.kept.length) {
        this.port.postMessage(this.kept.slice().buffer);
        this.size = 0;
      }
    }
    return true;
  }
}
registerProcessor("microphone", Microphone);
