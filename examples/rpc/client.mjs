// A client of `edge-run rpc` for Node and Electron: node client.mjs SAVED-SESSION [MODEL]
import { spawn } from "node:child_process";
import { createInterface } from "node:readline";

class EdgeRun {
  #next = 1;
  #waiting = new Map();
  constructor(...models) {
    this.child = spawn("edge-run", ["rpc", ...models], { stdio: ["pipe", "pipe", "inherit"], windowsHide: true });
    createInterface({ input: this.child.stdout }).on("line", (line) => this.#receive(JSON.parse(line)));
    this.ended = new Promise((resolve) => this.child.on("close", resolve));
    this.ended.then(() => this.#waiting.forEach(({ reject }) => reject(new Error("edge-run has ended"))));
  }
  #receive({ id, result, error, params }) {
    if (params) return this.#waiting.get(params.request_id)?.onUpdate(params); // a notification
    const { resolve, reject } = this.#waiting.get(id) ?? { reject: console.error };
    this.#waiting.delete(id);
    return error ? reject(Object.assign(new Error(error.message), error)) : resolve(result);
  }
  #write = (message) => this.child.stdin.write(JSON.stringify({ jsonrpc: "2.0", ...message }) + "\n");
  request(method, params = {}, onUpdate = () => {}) {
    const id = this.#next++;
    const answer = new Promise((resolve, reject) => this.#waiting.set(id, { resolve, reject, onUpdate }));
    this.#write({ id, method, params });
    return Object.assign(answer, { cancel: () => this.#write({ method: "$/cancelRequest", params: { id } }) });
  }
  close() {
    this.child.stdin.end();
    return this.ended;
  }
}

const [saved, ...models] = process.argv.slice(2);
let llm = new EdgeRun(...models);
console.log("version", (await llm.request("initialize", { protocol_version: 1 })).protocol_version);
await llm.request("models/load", {}, ({ stage, fraction }) => console.log("progress", stage, fraction));
const chat = { messages: [{ role: "user", content: "list files" }], stream: true, temperature: 0, max_tokens: 24 };
const pieces = [];
await llm.request("generate", chat, ({ chunk }) => chunk && pieces.push(chunk.choices[0].delta.content ?? ""));
console.log("answer", pieces.join(""));
const endless = llm.request("generate", { ...chat, max_tokens: null, ignore_eos: true }, () => endless.cancel());
await endless.catch((error) => console.log("cancelled", error.code));
const { session_id } = await llm.request("session/new");
const prompt = { session_id, prompt: "list files", temperature: 0, max_tokens: 24 };
console.log("session", (await llm.request("session/prompt", prompt)).text);
await llm.request("session/save", { session_id, path: saved });
console.log("end", await llm.close());
llm = new EdgeRun(...models);
await llm.request("initialize", { protocol_version: 1 });
prompt.session_id = (await llm.request("session/restore", { path: saved })).session_id;
const { text, usage } = await llm.request("session/prompt", { ...prompt, prompt: "only hidden ones" });
console.log("restored", text);
console.log("from the cache", usage.cached_tokens > 0);
console.log("end", await llm.close());
