// The texts of files that the user adds to a message.

import { complain } from "./dom.js";

const LIBRARY = "./lib/pdf.min.mjs";
const WORKER = new URL("./lib/pdf.worker.min.mjs", import.meta.url).href;

// Returns the name and the text of each file that could be read. Tells the user about the others.
export async function read(files) {
  const found = [];
  const wrong = [];
  for (const file of files) {
    try {
      found.push({ name: file.name, text: await (isPdf(file) ? pdf(file) : plain(file)) });
    } catch (err) {
      wrong.push(err.message);
    }
  }
  complain(wrong.join(" "));
  return found;
}

const isPdf = ({ name, type }) => type === "application/pdf" || name.toLowerCase().endsWith(".pdf");

// The text of a file in UTF-8, or in UTF-16 with a byte order mark, as the commands read it.
async function plain(file) {
  try {
    const bytes = new Uint8Array(await file.arrayBuffer());
    const encoding = { "255,254": "utf-16le", "254,255": "utf-16be" }[bytes.slice(0, 2)] ?? "utf-8";
    const text = new TextDecoder(encoding, { fatal: true }).decode(bytes);
    if (!text.includes("\0")) return text.replace(/\r\n?/g, "\n");
  } catch { /* another encoding */ }
  throw new Error(`${file.name} is not a text in UTF-8: save it as UTF-8, and add that.`);
}

// The library is loaded with the first PDF.
async function pdf(file) {
  let text = "";
  try {
    const library = await import(LIBRARY);
    library.GlobalWorkerOptions.workerSrc = WORKER;
    const task = library.getDocument({ data: await file.arrayBuffer(), verbosity: 0, useWasm: false, useWorkerFetch: false });
    const book = await task.promise;
    const pages = [];
    for (let i = 1; i <= book.numPages; i += 1) pages.push(textOf(await (await book.getPage(i)).getTextContent()));
    text = pages.join("\n\n").trim();
    await task.destroy();
  } catch {
    throw new Error(`${file.name} cannot be read as a PDF: convert it to text (pdftotext), and add that.`);
  }
  if (!text) throw new Error(`${file.name} has no text, only images: recognize its text first (ocrmypdf).`);
  return text;
}

const textOf = ({ items }) => items.map((item) => (item.str ?? "") + (item.hasEOL ? "\n" : "")).join("");
