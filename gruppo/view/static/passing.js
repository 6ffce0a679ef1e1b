// When a completion counts as right: chosen once, and true on every page.

import { choice, el, field } from "./dom.js";

const chosen = { pass_reward: "reward", pass_at: 0.5 };

/** The choice as parameters of a question. */
export const passing = () => ({ ...chosen });

/** Take over what an address says. */
export function readPassing(params) {
  if (params.has("pass_reward")) chosen.pass_reward = params.get("pass_reward");
  if (params.has("pass_at") && Number.isFinite(Number(params.get("pass_at")))) chosen.pass_at = Number(params.get("pass_at"));
}

/** The two controls. */
export function passingFields(run, changed) {
  const names = ["reward", ...run.rewards.filter((name) => name !== "reward")];
  if (!names.includes(chosen.pass_reward)) chosen.pass_reward = "reward";
  const title = (name) => (name === "reward" ? "the weighted sum" : name);
  const at = el("input", {
    type: "number", step: "any", value: chosen.pass_at,
    onchange: (event) => {
      if (event.target.value !== "" && Number.isFinite(Number(event.target.value))) {
        chosen.pass_at = Number(event.target.value);
        changed();
      }
    },
  });
  return el("fieldset", { class: "row" }, el("legend", {}, "A completion is right if"),
    field("reward", choice(names.map((name) => [name, title(name)]), chosen.pass_reward, (value) => { chosen.pass_reward = value; changed(); })),
    field("is at least", at));
}
