// The server's facts about itself and its model (/props), and the dialog that shows them.

import { request } from "./api.js";
import { at, bytes, count, element } from "./dom.js";

let props = null;
let asked = ""; // the server run whose facts were requested

export const defaults = () => props?.default_generation_settings.params ?? {};
export const hasPool = () => Boolean(props?.kvflash?.pool);
export const context = () => props?.default_generation_settings.n_ctx ?? 0;

// Request the facts of a server that is ready, once per run. The page is told by the event "props".
export async function learn(run) {
  if (asked === run) return;
  asked = run;
  try {
    props = await (await request("props")).json();
    document.dispatchEvent(new Event("props"));
  } catch {
    asked = "";
  }
}

export function start() {
  const dialog = at("model-dialog");
  at("model").addEventListener("click", () => {
    if (!props) return;
    fill();
    dialog.showModal();
  });
  at("model-close").addEventListener("click", () => dialog.close());
}

function fill() {
  const [own, meta] = [props.kvflash ?? {}, props.kvflash?.model ?? {}];
  const caps = Object.entries(props.chat_template_caps ?? {}).filter(([, can]) => can).map(([name]) => name.replace("supports_", "").replaceAll("_", " "));
  const rows = [
    ["Name", props.model_alias],
    ["What", meta.description],
    ["Parameters", meta.n_params && count(meta.n_params)],
    ["Weights", meta.n_bytes && bytes(meta.n_bytes)],
    ["Layers", meta.n_layer && count(meta.n_layer)],
    ["Context", `${count(context())} tokens${meta.n_ctx_train ? `; the model was trained for ${count(meta.n_ctx_train)}` : ""}`],
    ["Pool", own.pool ? `${count(own.pool)} tokens, chosen by ${own.policy}` : "none: the full cache"],
    ["At once", `${count(props.total_slots)} ${props.total_slots === 1 ? "conversation" : "conversations"}`],
    ["Template", caps.length ? `supports ${caps.join(", ")}` : "plain"],
    ["File", props.model_path],
    ["Server", props.build_info],
  ].filter(([, text]) => text);
  at("model-figures").replaceChildren(...rows.flatMap(([name, text]) => [element("dt", "", name), element("dd", "", text)]));
  at("model-template").textContent = props.chat_template;
  at("model-template").parentElement.hidden = !props.chat_template;
}
