// Server-sent events of a POST, which EventSource cannot make: an async generator of the text of each event.

/** @param {Response} response */
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
