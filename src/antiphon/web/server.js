// The server tab: load, sessions, headroom, telephone calls and delays, from the server's metrics.

const $ = (id) => document.getElementById(id);
const EVERY_MS = 2000;
const KINDS = {
  captions: "Captions",
  conversation: "Conversations",
  duplex: "Full duplex",
  speech: "Speech",
  video: "Camera",
};
// The parts of an answer's delay, in the order of a turn.
const DELAYS = [
  ["antiphon_turn_stage_seconds", { stage: "endpoint" }, "End noticed"],
  ["antiphon_turn_stage_seconds", { stage: "final" }, "Transcript"],
  ["antiphon_turn_stage_seconds", { stage: "first_token" }, "First words"],
  ["antiphon_turn_stage_seconds", { stage: "first_sound" }, "First sound"],
  ["antiphon_voice_to_voice_seconds", {}, "Voice to voice"],
];

/** Parse Prometheus's text format into samples: [{name, labels, value}]. */
export function samples(text) {
  const found = [];
  for (const line of text.split("\n")) {
    const [, name, labels, value] = line.match(/^([a-z_]\w*)(?:\{(.*)\})? (\S+)/i) ?? [];
    if (!name) continue;
    const pairs = [...(labels ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map(([, k, v]) => [k, v]);
    found.push({ name, labels: Object.fromEntries(pairs), value: Number(value) });
  }
  return found;
}

/** The quantile `q` of a histogram, in seconds; null without observations. */
export function quantileOf(all, name, wanted, q) {
  const buckets = all
    .filter((s) => s.name === `${name}_bucket` && Object.entries(wanted).every(([k, v]) => s.labels[k] === v))
    .map(({ labels, value }) => ({ bound: labels.le === "+Inf" ? Infinity : Number(labels.le), value }))
    .sort((a, b) => a.bound - b.bound);
  const total = buckets.at(-1)?.value ?? 0;
  let low = 0,
    below = 0;
  if (!total) return null;
  for (const { bound, value } of buckets) {
    if (value >= q * total)
      return bound === Infinity ? low : low + ((bound - low) * (q * total - below)) / Math.max(value - below, 1e-9);
    [low, below] = [bound, value];
  }
  return low;
}

export class ServerTab {
  constructor(page) {
    this.page = page;
    this.timer = null;
    $("metrics-key").onchange = () => this.look();
  }

  /** Called when the tab is shown or hidden. */
  shown(is) {
    this.isShown = is;
    if (is) this.look();
  }

  /** Read the metrics now, and every EVERY_MS while the tab is shown. */
  async look() {
    clearTimeout(this.timer);
    const mine = (this.looks = (this.looks ?? 0) + 1);
    await this.read();
    if (this.isShown && mine === this.looks) this.timer = setTimeout(() => this.look(), EVERY_MS);
  }

  async read() {
    const key = $("metrics-key").value.trim();
    try {
      const answer = await fetch("metrics", {
        headers: key ? { Authorization: `Bearer ${key}` } : {},
        signal: AbortSignal.timeout(5000),
      });
      $("metrics-field").hidden = answer.status !== 401 && !key;
      if (answer.status === 401) {
        $("server-board").hidden = true;
        this.page.fail("server", new Error(key ? "The key of the metrics is wrong." : "The metrics need a key."));
      } else if (answer.status === 404) {
        $("server-board").hidden = true;
        this.page.fail("server", new Error("The metrics are not available at this address: a proxy hides them."));
      } else if (!answer.ok) throw new Error(`status ${answer.status}`);
      else {
        this.page.clear("server");
        this.show(samples(await answer.text()));
        $("server-board").hidden = false;
      }
    } catch {
      $("server-board").hidden = true;
      this.page.fail("server", new Error("The server does not answer. This page tries again every two seconds."));
    }
  }

  show(all) {
    const value = (name, wanted = {}) =>
      all.find((s) => s.name === name && Object.entries(wanted).every(([k, v]) => s.labels[k] === v))?.value;
    const load = value("antiphon_load");
    $("load").value = Math.min(1, load ?? 0);
    $("load-text").textContent = load === undefined ? "unknown, no certificate" : `${Math.round(100 * load)} %`;
    const red = all.filter((s) => s.name === "antiphon_red" && s.value).map((s) => s.labels.light);
    const room = red.length ? `No new sessions are admitted now: ${red.join(", ")}` : load < 1 ? "There is room." : "";
    if ($("lights").textContent !== room) $("lights").textContent = room;
    const held = all.filter((s) => s.name === "antiphon_held_sessions");
    rows($("kinds"), held, ({ labels: { kind }, value: count }) => [
      KINDS[kind] ?? kind,
      count,
      value("antiphon_headroom_sessions", { kind }) ?? "–",
      value("antiphon_capacity_sessions", { kind }) ?? "–",
    ]);
    const calls = all.filter((s) => s.name === "antiphon_telephone_calls");
    const carriers = [...new Set(calls.map((s) => s.labels.carrier))];
    $("calls").parentElement.hidden = !carriers.length;
    rows($("calls"), carriers, (carrier) => {
      const ended = all.filter(
        (s) => s.name === "antiphon_telephone_calls_ended_total" && s.labels.carrier === carrier,
      );
      return [
        carrier,
        value("antiphon_telephone_calls", { carrier, direction: "incoming" }) ?? 0,
        value("antiphon_telephone_calls", { carrier, direction: "outgoing" }) ?? 0,
        ended.map((s) => `${s.labels.reason} ${s.value}`).join(", "),
      ];
    });
    rows($("delays"), DELAYS, ([name, labels, title]) => [
      title,
      value(`${name}_count`, labels) ?? 0,
      ...[0.5, 0.95].map((q) => {
        const found = quantileOf(all, name, labels, q);
        return found === null ? "–" : Math.round(1000 * found);
      }),
    ]);
  }
}

function rows(table, all, cells) {
  table.tBodies[0].replaceChildren(
    ...all.map((one) => {
      const row = document.createElement("tr");
      cells(one).forEach((text, k) => {
        const cell = document.createElement(k ? "td" : "th");
        if (!k) cell.scope = "row";
        cell.textContent = text;
        row.append(cell);
      });
      return row;
    }),
  );
}
