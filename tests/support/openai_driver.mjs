// Sends the requests of a JSON file with OpenAI's npm package and prints what came back, as JSON.
// usage: node openai_driver.mjs REQUESTS, beside a node_modules folder that has the package
import { readFileSync } from "node:fs";
import OpenAI from "openai";

const { base, requests } = JSON.parse(readFileSync(process.argv[2], "utf-8"));

async function collect(items, most) {
  const objects = [];
  for await (const item of items) {
    objects.push(item);
    if (objects.length === most) break; // leaving the loop cancels the request
  }
  return objects;
}

async function call(client, { method, arguments: fields, extra, leave_after: most }) {
  const names = method.split(".");
  const name = names.pop();
  const resource = names.reduce((place, each) => place[each], client);
  if (method === "models.retrieve") return { objects: [await resource.retrieve(fields.model)] };
  if (method === "chat.completions.stream") return { objects: [await resource.stream(fields).finalChatCompletion()] };
  if (method === "responses.stream") {
    const response = await resource.stream(fields).finalResponse();
    return { objects: [response], text: response.output_text };
  }
  const result = await resource[name]({ ...fields, ...extra });
  if (Symbol.asyncIterator in result) return { objects: await collect(result, most) };
  return { objects: [result], text: result.output_text };
}

const anyone = new OpenAI({ baseURL: base, apiKey: "none" });
const outcomes = [];
for (const request of requests) {
  const client = anyone.withOptions({ apiKey: request.api_key, maxRetries: request.retries });
  const held = [];
  try {
    for (const fields of request.held) held.push(await client.chat.completions.create(fields));
    outcomes.push(await call(client, request));
  } catch (error) {
    if (!(error instanceof OpenAI.APIError)) throw error;
    const { status, code, param, type } = error;
    outcomes.push({ error: { class: error.constructor.name, status, code, param, type, message: error.error.message } });
  } finally {
    for (const stream of held) stream.controller.abort();
  }
}
console.log(JSON.stringify(outcomes));
