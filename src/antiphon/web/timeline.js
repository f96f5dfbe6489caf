// The last seconds of a conversation, drawn; times are of performance.now(), in ms.

const SPAN_MS = 20000,
  LANES = ["you", "thinking", "answer"],
  NAMES = { you: "You", thinking: "Thinking", answer: "Answer" },
  LABEL_PX = 70;

export class Timeline {
  spans = []; // {lane, from, to}
  marks = []; // {at, text}
  constructor(canvas) {
    this.canvas = canvas;
    this.draw = this.draw.bind(this);
    // A window that was turned or resized: what is still is drawn anew, at the time at which it stopped.
    new ResizeObserver(() => this.painted && this.paint(this.painted)).observe(canvas);
  }
  start() {
    this.running = true;
    requestAnimationFrame(this.draw);
  }
  stop() {
    this.running = false;
    for (const lane of LANES) this.end(lane);
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
    if (!this.running) return;
    if (now - (this.painted || 0) > 60) this.paint(now);
    requestAnimationFrame(this.draw);
  }
  paint(now) {
    this.painted = now;
    const from = now - SPAN_MS;
    this.spans = this.spans.filter((s) => s.to === null || s.to > from);
    this.marks = this.marks.filter((m) => m.at > from);
    const { canvas } = this,
      ratio = devicePixelRatio || 1,
      width = canvas.clientWidth,
      height = 132;
    if (canvas.width !== width * ratio) {
      canvas.width = width * ratio;
      canvas.height = height * ratio;
    }
    const pen = canvas.getContext("2d"),
      style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(`--${name}`).trim();
    const paint = { you: color("mine"), thinking: color("think"), answer: color("theirs") };
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = "12px system-ui, sans-serif";
    const x = (t) => LABEL_PX + ((t - from) / SPAN_MS) * (width - LABEL_PX);
    LANES.forEach((lane, k) => {
      const y = 14 + k * 34;
      pen.fillStyle = color("soft");
      pen.fillText(NAMES[lane], 4, y + 14);
      pen.fillStyle = paint[lane];
      for (const s of this.spans.filter((s) => s.lane === lane)) {
        const left = Math.max(LABEL_PX, x(s.from)),
          right = x(s.to ?? now);
        if (right > LABEL_PX) pen.fillRect(left, y, Math.max(2, right - left), 20);
      }
    });
    for (const m of this.marks) {
      const left = x(m.at);
      if (left < LABEL_PX) continue;
      pen.fillStyle = color("stop");
      pen.fillRect(left, 4, 1.5, 112);
      // Beside its line: on the left of it where the right has no room.
      const wide = pen.measureText(m.text).width;
      pen.fillText(m.text, left + 4 + wide > width ? left - 4 - wide : left + 4, 128);
    }
  }
}
