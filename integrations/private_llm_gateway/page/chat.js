// The conversation: questions, answers as they come, and what becomes of those that fail.

import { complete, events, info, keepToken, message, takeToken, Trouble } from "./gateway.js";
import { Cost, element, showInfo, showTotal } from "./panel.js";

const LONG_MS = 5000; // without a word: the reader is told why that may be
const $ = (id) => document.getElementById(id);
const log = $("log");
const question = $("question");

let facts = null; // what the gateway says of itself
let messages = []; // what was said, as the gateway gets it
let total = { answers: 0, bytes: 0, rounds: 0 };
let running = null; // stops the answer that comes

async function connect() {
  try {
    facts = await info();
    showInfo(facts);
    trouble("");
    question.focus();
  } catch (error) {
    if (!(error instanceof Trouble)) throw error;
    $("model").textContent = "not connected";
    if (error.token) askToken(error.message);
    else trouble(error.message, connect);
  }
  return facts !== null;
}

function askToken(why) {
  $("door-text").textContent = `${why} The gateway printed its token when it started; it stays in this tab.`;
  if (!$("door").open) $("door").showModal();
  $("token").focus();
}

/** Say what is wrong, with a button if it can be tried again; "" for nothing. */
function trouble(words, again = null) {
  const place = $("trouble");
  place.hidden = words === "";
  place.textContent = words;
  if (again && words) {
    const button = element("button", "Try again");
    button.type = "button";
    button.addEventListener("click", () => again());
    place.append(button);
  }
  if (words) log.scrollTop = log.scrollHeight; // it takes room from the log
}

/** What a program said, as a sentence. */
function sentence(words) {
  return words.charAt(0).toUpperCase() + words.slice(1) + (/[.!?]$/.test(words) ? "" : ".");
}

function bubble(kind, who, text = "") {
  $("empty").hidden = true;
  const made = element("article", "", kind);
  made.setAttribute("aria-label", who);
  const body = element("p", text, "text");
  made.append(body);
  log.append(made);
  log.scrollTop = log.scrollHeight;
  return { made, body };
}

/** Add to an answer as text, and stay at its end if the reader is there. */
function say(body, text) {
  const near = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  body.append(document.createTextNode(text));
  if (near) log.scrollTop = log.scrollHeight;
}

function busy(is) {
  if (!is) running = null;
  $("send").hidden = is;
  $("stop").hidden = !is;
}

async function ask(text) {
  if (running || (!facts && !(await connect()))) return;
  trouble("");
  question.value = "";
  grow();
  const asked = bubble("user", "You", text);
  const { made, body } = bubble("assistant waiting", `Answer of ${facts.model}`);
  made.setAttribute("aria-busy", "true"); // a screen reader reads it when it is whole
  const long = setTimeout(() => made.classList.add("long"), LONG_MS);
  const mine = (running = new AbortController());
  const history = messages;
  history.push({ role: "user", content: text });
  const cost = new Cost(mine.signal);
  busy(true);
  let state = "";
  let problem = null;
  try {
    state = await receive(history, mine.signal, body, made, cost);
  } catch (error) {
    if (error.name === "AbortError") state = "stopped";
    else problem = error instanceof Trouble ? error : new Trouble("The connection ended before the answer did.");
  } finally {
    clearTimeout(long);
    if (running === mine) busy(false);
    made.classList.remove("waiting");
    made.removeAttribute("aria-busy");
  }
  if (history !== messages) return; // another conversation was begun meanwhile
  const spent = cost.end();
  total = { answers: total.answers + 1, bytes: total.bytes + cost.bytes, rounds: total.rounds + cost.rounds };
  showTotal(total);
  if (body.textContent) {
    history.push({ role: "assistant", content: body.textContent });
    if (problem) state = "incomplete";
    made.append(element("p", state ? `${spent} · ${state}` : spent, "spent"));
  } else if (problem || state === "stopped") {
    history.pop(); // no answer: the question goes back where it came from
    asked.made.remove();
    made.remove();
    $("empty").hidden = messages.length > 0;
    if (question.value === "") question.value = text;
    grow();
  }
  if (problem) {
    const kept = body.textContent ? "The text so far was kept." : "Your question is in the box below.";
    trouble(`${sentence(problem.message)} ${kept}`);
    if (problem.token) askToken(problem.message);
  }
  if (!$("door").open) question.focus();
}

/** What the fields below the question say. */
function how() {
  const longest = $("longest").valueAsNumber;
  const temperature = $("temperature").valueAsNumber;
  const said = { temperature: Number.isFinite(temperature) ? temperature : 0 };
  return Number.isFinite(longest) ? { ...said, max_tokens: longest } : said;
}

/** Write the answer as it comes; how it ended, in words ("" for its own end). */
async function receive(history, signal, body, made, cost) {
  let state = "";
  for await (const event of events(await complete(facts.model, history, how(), signal))) {
    if (event === "[DONE]") return state;
    const chunk = JSON.parse(event);
    if (chunk.error) throw new Trouble(message(chunk.error) || "The gateway could not go on.");
    cost.take(chunk);
    const choice = chunk.choices?.[0];
    if (choice?.delta?.content) {
      made.classList.remove("waiting");
      say(body, choice.delta.content);
    }
    if (choice?.finish_reason === "length") state = "cut at its longest";
  }
  throw new Trouble("The connection ended before the answer did.");
}

function restart() {
  running?.abort();
  busy(false);
  messages = [];
  total = { answers: 0, bytes: 0, rounds: 0 };
  for (const old of log.querySelectorAll("article")) old.remove();
  $("empty").hidden = false;
  for (const id of ["speed", "bytes", "rounds", "time"]) $(id).textContent = "–";
  trouble("");
  showTotal(total);
  question.focus();
}

/** The box is as high as its text, up to what the style allows. */
function grow() {
  question.style.height = "auto";
  question.style.height = `${question.scrollHeight + 2}px`;
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = question.value.trim();
  if (text) ask(text);
});
question.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("ask").requestSubmit(); // refused by the browser, with its reason, where a number is out of range
  }
});
question.addEventListener("input", grow);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !$("door").open) running?.abort();
});
$("stop").addEventListener("click", () => running?.abort());
$("new").addEventListener("click", restart);
$("enter").addEventListener("submit", () => {
  keepToken($("token").value);
  $("token").value = "";
  connect();
});

const wide = matchMedia("(min-width: 56rem)");
const fold = () => {
  $("panel").open = wide.matches;
};
wide.addEventListener("change", fold);
fold();
takeToken();
connect();
