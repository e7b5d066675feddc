// A conversation with a running `edge-run serve`, by OpenAI's package (npm install openai).
import OpenAI from "openai";

const { OPENAI_BASE_URL: baseURL = "http://127.0.0.1:8080/v1", OPENAI_API_KEY: apiKey = "none" } = process.env;
const client = new OpenAI({ baseURL, apiKey });
const fields = { model: (await client.models.list()).data[0].id, temperature: 0, max_tokens: 50, stream: true };
const messages = [];
for (const question of ["list all files of this folder", "only hidden ones"]) {
  messages.push({ role: "user", content: question });
  let answer = "", usage;
  const stream = await client.chat.completions.create({ messages, stream_options: { include_usage: true }, ...fields });
  for await (const chunk of stream) {
    const piece = chunk.choices[0]?.delta.content ?? "";
    process.stdout.write(piece);
    answer += piece;
    usage = chunk.usage;
  }
  messages.push({ role: "assistant", content: answer });
  console.log(`\n(${usage.prompt_tokens_details.cached_tokens} of ${usage.prompt_tokens} tokens were cached)`);
}
