// The times of each turn: the last turn in large figures, with the session's median and p95, and a table of all turns.

const STAGES = {
  ended: "End noticed",
  transcript: "Transcript",
  words: "First words",
  sound: "First sound",
  heard: "Heard",
};
const NAMES = Object.keys(STAGES);

/** The quantile `q` of the values, interpolated between two of them. */
export function quantile(values, q) {
  const sorted = [...values].sort((a, b) => a - b),
    at = q * (sorted.length - 1),
    low = sorted[Math.floor(at)];
  return low + (sorted[Math.ceil(at)] - low) * (at - Math.floor(at));
}

export class Stages {
  constructor(tiles, table) {
    this.rows = table.tBodies[0];
    this.all = Object.fromEntries(NAMES.map((name) => [name, []]));
    this.tiles = Object.fromEntries(
      NAMES.map((name) => {
        const tile = document.createElement("div"),
          [title, value, spread] = ["dt", "dd", "dd"].map((tag) => document.createElement(tag));
        title.textContent = STAGES[name];
        value.textContent = "–";
        value.className = "figure";
        spread.className = "spread";
        tile.append(title, value, spread);
        tiles.append(tile);
        return [name, { value, spread }];
      }),
    );
    this.begin("");
  }

  /** Begin a session. `connection`: the text of the last column in its rows. */
  begin(connection) {
    this.connection = connection;
    this.row = this.turn = null;
    for (const name of NAMES) {
      this.all[name] = [];
      this.tiles[name].value.textContent = "–";
      this.tiles[name].spread.textContent = "";
    }
  }

  take({ turn, stage, ms }) {
    if (turn !== this.turn) {
      this.turn = turn;
      this.row = document.createElement("tr");
      this.row.append(...["turn", ...NAMES, "connection"].map(() => document.createElement("td")));
      this.row.children[0].textContent = turn;
      this.row.lastChild.textContent = this.connection;
      this.rows.prepend(this.row);
      for (const name of NAMES) this.tiles[name].value.textContent = "–";
    }
    const values = this.all[stage],
      { value, spread } = this.tiles[stage];
    values.push(ms);
    this.row.children[1 + NAMES.indexOf(stage)].textContent = Math.round(ms);
    value.textContent = Math.round(ms);
    if (values.length > 1)
      spread.textContent = `median ${Math.round(quantile(values, 0.5))}, p95 ${Math.round(quantile(values, 0.95))}`;
  }
}
