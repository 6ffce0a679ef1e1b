// Questions to the server, or to the data inside a report.

import { reported } from "./report.js";

/** The parameters of a question or of an address: lists become repeated names, empty values are left out. */
export function query(values) {
  const found = new URLSearchParams();
  for (const [name, value] of Object.entries(values)) {
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== null && each !== undefined && each !== "" && each !== false) found.append(name, each === true ? "1" : each);
    }
  }
  return found;
}

export const report = document.getElementById("report") === null ? null : reported(document.getElementById("report"));

/** The answer to a question; an Error with what the server said if there is none. */
export async function ask(question, values = {}, signal = undefined) {
  if (report !== null) return report(question, values);
  let response;
  try {
    response = await fetch(`/api/${question}?${query(values)}`, { signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The viewer does not respond. Is `gruppo view` still running?");
  }
  const answer = await response.json().catch(() => ({})); // a failure of the viewer itself is told in its terminal
  if (!response.ok) throw new Error(answer.error ?? `The viewer answered ${response.status}.`);
  return answer;
}

/** Asks the same question again and again, and forgets about the answers that come too late. */
export function asker(question) {
  let pending = null;
  return async (values) => {
    pending?.abort();
    pending = new AbortController();
    try {
      return await ask(question, values, pending.signal);
    } catch (error) {
      if (error.name === "AbortError") return null;
      throw error;
    }
  };
}
