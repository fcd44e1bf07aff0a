// Records the microphone and makes a WAV file of it, which the server reads without any library for other forms.

const RATE = 16000; // samples a second, as the model hears

/** What the microphone hears, from `begin` to `end`. */
export class Recording {
  /** Ask for the microphone and begin. Throws an Error in words for the reader. */
  static async begin() {
    if (!navigator.mediaDevices) {
      throw new Error("The browser gives a page the microphone only over TLS, or from this machine: open it as localhost.");
    }
    try {
      return new Recording(await navigator.mediaDevices.getUserMedia({ audio: true }));
    } catch (error) {
      throw new Error(`The microphone cannot be used: ${error.message || error.name}`);
    }
  }

  constructor(stream) {
    this.stream = stream;
    this.parts = [];
    this.recorder = new MediaRecorder(stream);
    this.recorder.addEventListener("dataavailable", (event) => this.parts.push(event.data));
    this.recorder.start();
  }

  /** End the recording, and return it as a WAV file. */
  async end() {
    const stopped = new Promise((done) => { this.recorder.addEventListener("stop", done); });
    this.recorder.stop();
    await stopped;
    this.stream.getTracks().forEach((track) => track.stop());
    const packed = await new Blob(this.parts).arrayBuffer();
    if (!packed.byteLength) throw new Error("Nothing was recorded.");
    // An offline context decodes to its own rate; its length does not matter for that.
    const sound = await new OfflineAudioContext(1, 1, RATE).decodeAudioData(packed);
    return wav(mixed(sound));
  }
}

/** Return the mean of all channels. */
function mixed(sound) {
  const samples = new Float32Array(sound.length);
  for (let channel = 0; channel < sound.numberOfChannels; channel += 1) {
    const own = sound.getChannelData(channel);
    for (let i = 0; i < samples.length; i += 1) samples[i] += own[i] / sound.numberOfChannels;
  }
  return samples;
}

/** Return samples of one channel as a WAV file of 16 bits. */
function wav(samples) {
  const view = new DataView(new ArrayBuffer(44 + 2 * samples.length));
  const name = (at, letters) => [...letters].forEach((letter, i) => view.setUint8(at + i, letter.charCodeAt(0)));
  name(0, "RIFF");
  view.setUint32(4, 36 + 2 * samples.length, true);
  name(8, "WAVEfmt ");
  view.setUint32(16, 16, true);
  view.setUint16(20, 1, true); // whole numbers
  view.setUint16(22, 1, true); // channels
  view.setUint32(24, RATE, true);
  view.setUint32(28, 2 * RATE, true);
  view.setUint16(32, 2, true);
  view.setUint16(34, 16, true);
  name(36, "data");
  view.setUint32(40, 2 * samples.length, true);
  samples.forEach((sample, i) => view.setInt16(44 + 2 * i, 32767 * Math.max(-1, Math.min(1, sample)), true));
  return new Blob([view], { type: "audio/wav" });
}
