// The pool in words and numbers, for the panel.

import { at, bytes, count, element, time, write } from "./dom.js";

const share = (n, of) => `${((100 * n) / of).toFixed(n === of ? 0 : 1)} %`;

// all: the server's report. s: the sequence on the page.
export function describe(all, s) {
  write(at("plain"), plain(all));
  write(at("summary"), summary(all, s));
  figures(all, s);
}

// An explanation of the panel for someone who knows nothing about pools.
function plain({ pool_cells: cells, chunk, policy, gpu }) {
  if (cells === null) return `There is no pool: everything that the model has read stays ${gpu ? "on the GPU" : "in its cache"}.`;
  const part = policy === "fresh" ? "partly filled ones are read by some of its layers only, and " : "";
  return `Each square is ${count(chunk)} tokens of the text: the model reads the filled ones${gpu ? ", on the GPU," : ""} for its next word,`
    + ` ${part || "and "}empty ones wait in RAM until they matter.`;
}

function summary(all, { n_tokens: n, reading }) {
  const text = `${count(n)} of ${count(all.n_ctx)} tokens of context`;
  const now = reading ? `, reading ${count(reading[0])} of ${count(reading[1])}` : "";
  return all.pool_cells === null ? `Full cache. ${text}${now}.`
    : `A pool of ${count(all.pool_cells)} tokens, chosen by ${all.policy}. ${text}${now}.`;
}

function figures(all, s) {
  const codes = all.coarse_bytes ? `, ${bytes(all.coarse_bytes)} of it codes of everything` : "";
  const rows = [["KV on the device", `${bytes(all.device_kv_bytes)}${codes}; the full cache takes ${bytes(all.kv_full_bytes)}`]];
  if (all.pool_cells !== null) {
    const disk = all.disk_bytes ? `, ${bytes(all.disk_bytes)} on disk` : "";
    const last = s.reselect;
    rows.push(
      ["In the pool", `${count(s.resident)} of ${count(s.state.length)} chunks of ${all.chunk} tokens`],
      ...(s.layers.length ? [["In some layers", layers(all, s)]] : []),
      ["Host records", `${bytes(all.host_bytes)}${disk}`],
      ["Moved", moved(all, s)],
      ["Choices", choices(all, s)],
    );
    if (last) {
      rows.push(["Last choice", `at token ${count(last.pos)}: ${last.page_ins.length} in, ${last.drops.length} out;`
        + ` ${time(last.score_s)} to score, ${time(last.apply_s)} to move`]);
    }
    rows.push(["Agreement", agreement(all, s)]);
  }
  const list = at("figures");
  while (list.children.length < 2 * rows.length) list.append(element("dt"), element("dd"));
  while (list.children.length > 2 * rows.length) list.lastChild.remove();
  rows.flat().forEach((text, i) => write(list.children[i], text));
}

// Of the chunks that not all layers hold: how many some layers hold, and how many layers hold them on average.
function layers(all, { state, layers: counts }) {
  const out = counts.filter((_, chunk) => state[chunk] !== "1");
  const some = out.filter((n) => n > 0);
  if (!some.length) return `none of the ${count(out.length)} others`;
  const mean = some.reduce((sum, n) => sum + n, 0) / some.length;
  return `${count(some.length)} of the ${count(out.length)} others, in ${mean.toFixed(1)} of ${all.n_layer} layers on average`;
}

function choices(all, s) {
  if (all.policy === "fresh") {
    return s.guest_blocks ? `each layer for every token, in ${count(s.guest_blocks)} blocks; ${count(all.guests_fetched)} guests fetched` : "none yet";
  }
  return s.reselects ? `${count(s.reselects)} in ${time(s.reselect_s)}` : "none yet";
}

function moved(all, s) {
  const more = all.pages_in !== s.pages_in || all.pages_out !== s.pages_out
    ? `; ${count(all.pages_in)} and ${count(all.pages_out)} in all` : "";
  return `${count(s.pages_in)} came back, ${count(s.pages_out)} left${more}`;
}

function agreement(all, s) {
  if (!all.meter) return "not measured (--set meter=0.05)";
  if (!all.checked) return "nothing compared yet";
  const here = s.compared ? `; this answer ${share(s.compared[1], s.compared[0])} of ${count(s.compared[0])}` : "";
  return `${share(all.agreed, all.checked)} of ${count(all.checked)} tokens as in the full cache${here}`;
}
