// A report has its data inside. What the server would filter, sort and look up is done here, on the groups it holds.

const FLAGS = ["zero_spread", "truncated", "tool_failures", "reward_failures", "disagreement", "replaced"];

export function reported(element) {
  const data = JSON.parse(element.textContent);
  const groupsOf = (run) => data.groups[Number(run ?? 0)] ?? [];
  const answers = {
    overview: () => data.overview,
    state: () => ({ runs: data.overview.runs.map((run) => run.state) }),
    settings: ({ run }) => data.settings[Number(run ?? 0)],
    curves: ({ name }) => data.curves.filter((curve) => [name].flat().includes(curve.name)),
    groups: (asked) => listed(groupsOf(asked.run), asked),
    group: (asked) => withAccuracy(found(groupsOf(asked.run), asked, "group"), asked),
    tokens: (asked) => looked(data.tokens, `${asked.run ?? 0}/${asked.generation}/${asked.round ?? 0}/${asked.row}`),
    text: (asked) => textOf(groupsOf(asked.run), asked),
    prompts: (asked) => promptList(data.prompts[Number(asked.run ?? 0)], asked),
    prompt: ({ run, prompt_id }) => looked(data.histories, `${run ?? 0}/${prompt_id}`),
    compare: ({ first, second, benchmark, pass }) => looked(data.comparisons, `${first}/${second}/${benchmark}/${pass}`),
    problem: ({ evaluation, benchmark, pass, problem }) => looked(data.problems, `${evaluation}/${benchmark}/${pass}/${problem}`),
  };
  return (question, asked) => answers[question](asked);
}

function looked(table, key) {
  if (!Object.hasOwn(table, key)) throw new Error("This report does not include that. Run `gruppo view` on the run folder to see it.");
  return table[key];
}

function passRate(group, asked) {
  const name = asked.pass_reward ?? "reward", at = Number(asked.pass_at ?? 0.5);
  const right = group.completions.filter((each) => {
    const value = name === "reward" ? each.reward : each.rewards[name];
    return value !== null && value !== undefined && value >= at;
  });
  return right.length / Math.max(group.completions.length, 1);
}

const withAccuracy = (group, asked) => ({ ...group, accuracy: passRate(group, asked) });

function found(groups, asked, name) {
  const same = (group) => group.generation === Number(asked.generation) && group.round === Number(asked.round ?? 0)
    && group[name] === Number(asked[name]);
  const group = groups.find(same);
  if (group === undefined) throw new Error("This report does not include that group. Run `gruppo view` on the run folder to see it.");
  return group;
}

function textOf(groups, asked) {
  for (const group of groups) {
    if (group.generation !== Number(asked.generation) || group.round !== Number(asked.round ?? 0)) continue;
    const own = group.completions.find((each) => each.row === Number(asked.row));
    if (own !== undefined) return own.content;
  }
  throw new Error("This report does not include that completion.");
}

function hits(group, search) {
  const has = (parts) => parts.some((part) => part.text.toLowerCase().includes(search));
  return { prompt: has(group.prompt.parts), rows: group.completions.filter((each) => has(each.content.parts)).length };
}

/** The groups of a report that pass the filters, as the server lists them. */
function listed(groups, asked) {
  const search = (asked.search ?? "").toLowerCase();
  let chosen = groups.map((group) => ({ ...withAccuracy(group, asked), prompt: group.snippet, whole: group, hits: null }));
  if (asked.split) chosen = chosen.filter((group) => group.split === asked.split);
  if (asked.update !== undefined && asked.update !== null && asked.update !== "") {
    chosen = chosen.filter((group) => group.update === Number(asked.update));
  }
  for (const name of asked.filter ?? []) if (FLAGS.includes(name)) chosen = chosen.filter((group) => Number(group[name]) > 0);
  if (search) {
    chosen = chosen.filter((group) => {
      const own = hits(group.whole, search);
      group.hits = own.rows;
      return own.prompt || own.rows > 0;
    });
  }
  const order = asked.order ?? "update", sign = asked.descending ? -1 : 1;
  const key = (group) => (group[order] === null ? Infinity : sign * group[order]);
  chosen.sort((a, b) => key(a) - key(b));
  const first = Number(asked.first ?? 0);
  return {
    total: chosen.length,
    completions: chosen.reduce((sum, group) => sum + group.size, 0),
    first,
    groups: chosen.slice(first, first + Number(asked.count ?? 50)),
  };
}

const PROMPT_ORDERS = {
  hardest: (a, b) => a.last - b.last || a.rate - b.rate || b.times - a.times,
  solved: (a, b) => b.last - a.last || b.rate - a.rate || b.times - a.times,
  improved: (a, b) => b.change - a.change || b.times - a.times,
  worsened: (a, b) => a.change - b.change || b.times - a.times,
  times: (a, b) => b.times - a.times,
};

function promptList(list, asked) {
  const search = (asked.search ?? "").toLowerCase(), first = Number(asked.first ?? 0);
  const own = list.prompts.filter((each) => each.prompt.toLowerCase().includes(search));
  own.sort(PROMPT_ORDERS[asked.order ?? "hardest"]);
  return { ...list, total: own.length, first, prompts: own.slice(first, first + Number(asked.count ?? 50)) };
}
