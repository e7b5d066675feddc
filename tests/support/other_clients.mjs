// Asks a server with the npm packages of Ollama and of Anthropic, and prints what they read as JSON.
// usage: node other_clients.mjs BASE KEY REQUEST, beside a node_modules folder that has the packages
import Anthropic from "@anthropic-ai/sdk";
import { Ollama } from "ollama";

const [base, key, request] = process.argv.slice(2);
const { question, tool } = JSON.parse(request);
const ollama = new Ollama({ host: base, headers: { Authorization: `Bearer ${key}` } });
const anthropic = new Anthropic({ baseURL: base, apiKey: key, maxRetries: 0 });

const chat = { model: "bundle", messages: [question], tools: [tool], options: { temperature: 0 } };
const pieces = [];
for await (const piece of await ollama.chat({ ...chat, stream: true })) pieces.push(piece);
const refused = await ollama.show({ model: "other" }).catch((error) => error.message);

const { name, parameters } = tool.function;
const message = { model: "bundle", max_tokens: 100, messages: [question], tools: [{ name, input_schema: parameters }] };
const whole = await anthropic.messages.create({ ...message, temperature: 0 });
const streamed = await anthropic.messages.stream({ ...message, temperature: 0 }).finalMessage();
const unknown = await anthropic.messages.create({ ...message, model: "other" }).catch((error) => error);

console.log(
  JSON.stringify({
    ollama: { whole: await ollama.chat(chat), pieces, models: (await ollama.list()).models, refused },
    anthropic: { whole, streamed, unknown: [unknown.status, unknown.error.error.type] },
  }),
);
