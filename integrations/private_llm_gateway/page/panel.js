// Who holds what, and what it cost. All text is set as text, never read as markup.

const $ = (id) => document.getElementById(id);

/** An element with text in it. */
export function element(name, text = "", kind = "") {
  const made = document.createElement(name);
  made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

/** Bytes for people. */
export function size(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let step = 0;
  let value = bytes;
  while (value >= 1000 && step < units.length - 1) {
    value /= 1000;
    step += 1;
  }
  return `${step ? value.toFixed(value < 10 ? 2 : 1) : value} ${units[step]}`;
}

/** Fill in what the gateway says of the model and its parties. */
export function showInfo(info) {
  $("model").textContent = `${info.model} · protocol ${info.protocol}`;
  $("sentence").textContent = info.sentence ?? "";
  $("warning").hidden = info.one_machine !== true;
  const parties = info.parties ?? [];
  draw(parties.map((party) => party.name));
  for (const old of document.querySelectorAll("#parties .party")) old.remove();
  for (const party of parties) {
    const row = element("li", "", "holder party");
    row.append(element("h3", party.name), element("p", party.holds), element("p", party.host, "host"));
    $("parties").append(row);
  }
}

/** You above, the parties below; shares go down, masked values between the parties. */
function draw(names) {
  const add = (name, attributes, text = "") => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.textContent = text;
    $("drawing").append(made);
  };
  const node = (x, y, text, kind) => {
    const width = 18 + 7.5 * text.length;
    add("rect", { x: x - width / 2, y: y - 13, width, height: 26, rx: 13, class: kind });
    add("text", { x, y: y + 4.5, class: kind }, text);
  };
  const at = (index) => (300 * (index + 0.5)) / names.length;
  $("drawing").replaceChildren();
  $("drawing").setAttribute("aria-label", `You send shares to ${names.join(", ")}, who compute together`);
  if (names.length > 1) add("line", { x1: at(0), y1: 112, x2: at(names.length - 1), y2: 112, class: "between" });
  names.forEach((_, index) => add("line", { x1: 150, y1: 20, x2: at(index), y2: 98, class: "share" }));
  add("rect", { x: 118, y: 49, width: 64, height: 20, class: "label" });
  add("text", { x: 150, y: 63, class: "label" }, "shares");
  node(150, 18, "you", "you");
  names.forEach((name, index) => node(at(index), 112, name, "party"));
}

/** The cost of the answer that runs, or ran. */
export class Cost {
  /** signal: tells when the answer is given up, and the clock stops. */
  constructor(signal) {
    this.bytes = this.rounds = this.tokens = 0;
    this.started = performance.now();
    this.clock = setInterval(() => this.#time(), 200);
    signal.addEventListener("abort", () => clearInterval(this.clock));
    for (const id of ["speed", "bytes", "rounds"]) $(id).textContent = "–";
    this.#time();
  }

  /** A chunk's running totals. */
  take(chunk) {
    const told = chunk.private_llm;
    if (Number.isFinite(chunk.usage?.completion_tokens)) this.tokens = chunk.usage.completion_tokens;
    if (!told) return;
    if (Number.isFinite(told.bytes)) $("bytes").textContent = size((this.bytes = told.bytes));
    if (Number.isFinite(told.rounds)) $("rounds").textContent = (this.rounds = told.rounds).toLocaleString("en");
    if (Number.isFinite(told.tokens_per_s)) $("speed").textContent = `${told.tokens_per_s.toFixed(2)} tokens/s`;
  }

  /** The answer is over: its cost in a line. */
  end() {
    clearInterval(this.clock);
    this.#time();
    const parts = [`${this.#seconds().toFixed(1)} s`];
    if (this.tokens) parts.unshift(`${this.tokens} tokens`);
    if (this.bytes) parts.push(`${size(this.bytes)} sent`, `${this.rounds.toLocaleString("en")} rounds`);
    return parts.join(" · ");
  }

  #seconds() {
    return (performance.now() - this.started) / 1000;
  }

  #time() {
    $("time").textContent = `${this.#seconds().toFixed(1)} s`;
  }
}

/** What all answers of this conversation cost. */
export function showTotal(total) {
  const sums = `${size(total.bytes)} over all links, ${total.rounds.toLocaleString("en")} rounds`;
  $("total").textContent = total.answers ? `This conversation so far: ${sums}.` : "";
}
