// Draws the last seconds of a conversation: both waveforms, and events. Times are those of performance.now(), in ms.

const SPAN_MS = 20000,
  HEIGHT = 176,
  // By name: the title, the colour, and the position. Voices have a waveform, thinking does not.
  LANES = {
    user: { title: "You", color: "mine", y: 8, height: 56 },
    thinking: { title: "Thinking", color: "think", y: 70, height: 14 },
    assistant: { title: "Answer", color: "theirs", y: 90, height: 56 },
  },
  NAMES = Object.keys(LANES),
  LABEL_PX = 70;

export class Timeline {
  spans = []; // {lane, from, to}
  marks = []; // {at, text}
  levels = []; // {at, microphone, answer}: the volume of both sides
  constructor(canvas) {
    this.canvas = canvas;
    this.draw = this.draw.bind(this);
    // When the window is resized or turned, draw a stopped timeline again, at the time at which it stopped.
    new ResizeObserver(() => this.painted && this.paint(this.painted)).observe(canvas);
  }
  /** `read`: returns the current volume of both sides. */
  start(read) {
    this.read = read;
    requestAnimationFrame(this.draw);
  }
  stop() {
    this.read = null;
    for (const lane of NAMES) this.end(lane);
    this.paint(performance.now());
  }
  begin(lane, at = performance.now()) {
    if (!this.open(lane)) this.spans.push({ lane, from: at, to: null });
  }
  end(lane, at = performance.now()) {
    const span = this.open(lane);
    if (span) span.to = Math.max(at, span.from);
  }
  mark(text, at = performance.now()) {
    this.marks.push({ at, text });
  }
  open(lane) {
    return this.spans.find((s) => s.lane === lane && s.to === null);
  }
  draw(now) {
    if (!this.read) return;
    if (now - (this.painted || 0) > 30) {
      this.levels.push({ at: now, ...this.read() });
      this.paint(now);
    }
    requestAnimationFrame(this.draw);
  }
  /** Return a colour of the style sheet in a form that the canvas accepts. */
  color(name) {
    this.canvas.style.color = `var(--${name})`;
    return getComputedStyle(this.canvas).color;
  }
  paint(now) {
    this.painted = now;
    const from = now - SPAN_MS;
    this.spans = this.spans.filter((s) => s.to === null || s.to > from);
    this.marks = this.marks.filter((m) => m.at > from);
    this.levels = this.levels.filter((l) => l.at > from);
    const { canvas } = this,
      ratio = devicePixelRatio || 1,
      width = canvas.clientWidth;
    if (canvas.width !== Math.round(width * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = HEIGHT * ratio;
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, HEIGHT);
    pen.font = "12px system-ui, sans-serif";
    const x = (t) => LABEL_PX + ((t - from) / SPAN_MS) * (width - LABEL_PX);
    const soft = this.color("soft");
    for (const name of NAMES) {
      const { title, color, y, height } = LANES[name],
        paint = this.color(color),
        middle = y + height / 2;
      pen.fillStyle = soft;
      pen.fillText(title, 4, middle + 4);
      pen.fillStyle = paint;
      // A band shows who has the floor; the waveform is drawn over it.
      pen.globalAlpha = name === "thinking" ? 1 : 0.18;
      for (const s of this.spans.filter((s) => s.lane === name)) {
        const left = Math.max(LABEL_PX, x(s.from)),
          right = x(s.to ?? now);
        if (right > LABEL_PX) pen.fillRect(left, y, Math.max(2, right - left), height);
      }
      pen.globalAlpha = 1;
      if (name === "thinking") continue;
      const side = name === "user" ? "microphone" : "answer";
      for (const level of this.levels) {
        // Hearing is logarithmic: the square root keeps a quiet voice visible.
        const half = Math.max(0.5, (Math.sqrt(level[side]) * height) / 2);
        pen.fillRect(x(level.at) - 1, middle - half, 1.5, 2 * half);
      }
    }
    pen.fillStyle = this.color("stop");
    for (const m of this.marks) {
      const left = x(m.at);
      if (left < LABEL_PX) continue;
      pen.fillRect(left, 4, 1.5, HEIGHT - 24);
      // To the right of its line, or to the left if there is no room.
      const wide = pen.measureText(m.text).width;
      pen.fillText(m.text, left + 4 + wide > width ? left - 4 - wide : left + 4, HEIGHT - 6);
    }
  }
}
