// What the page asks of the gateway that served it, events of its streams, and failures in words.

const KEY = "private-llm token";

/** A failure with a sentence for people. token: whether another access token may help. code: OpenAI's word for it. */
export class Trouble extends Error {
  constructor(message, token = false, code = null) {
    super(message);
    this.token = token;
    this.code = code;
  }
}

/** Keep the token of `#token=...`, which is never sent, and take it out of the address. */
export function takeToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given === null) return;
  keepToken(given);
  history.replaceState(null, "", location.pathname + location.search);
}

export function keepToken(token) {
  sessionStorage.setItem(KEY, token.trim());
}

async function call(path, options = {}) {
  const token = sessionStorage.getItem(KEY);
  const headers = { "Content-Type": "application/json" };
  if (token) headers.Authorization = `Bearer ${token}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, credentials: "omit", redirect: "error" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Trouble("The gateway does not answer. Is it still running?");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const said = await response.json().catch(() => null);
  const words = message(said?.error) || `The gateway answered with status ${response.status}.`;
  if (response.status === 401) return new Trouble("The access token is missing or wrong.", true);
  const wait = response.headers.get("Retry-After");
  return new Trouble(/^\d+$/.test(wait ?? "") ? `${words} Try again in ${wait} s.` : words, false, said?.error?.code);
}

/** The sentence of an OpenAI error, if there is one. */
export function message(error) {
  return typeof error?.message === "string" && error.message !== "" ? error.message : "";
}

/** Which model, which parties, and what is protected. */
export async function info() {
  return (await call("/v1/private/info")).json();
}

/** The streaming answer to these messages. how: temperature, and max_tokens if an answer has a limit. */
export async function complete(model, messages, how, signal) {
  const ask = (more) => {
    const body = { model, messages, stream: true, stream_options: { include_usage: true }, ...more };
    return call("/v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
  };
  try {
    return await ask(how);
  } catch (error) {
    if (error.code !== "context_length_exceeded" || how.max_tokens === undefined) throw error;
    const { max_tokens: _, ...rest } = how; // less than that may still fit
    return ask(rest);
  }
}

/** The text of each server-sent event of a POST, which EventSource cannot make. @param {Response} response */
export async function* events(response) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      rest += decoder.decode(value, { stream: !done });
      const lines = rest.split(/\r?\n/); // a \r at the end waits for what follows
      rest = lines.pop();
      for (const line of lines) {
        if (line === "") {
          if (data.length) yield data.join("\n");
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        } // other fields, and comments that keep the connection open
      }
      if (done) return;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
