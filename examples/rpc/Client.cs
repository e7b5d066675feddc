// A client of `edge-run rpc` for .NET and Mono: Client SAVED-SESSION [MODEL]
// It picks fields out of the JSON by hand, so that Mono's compiler needs no package; use System.Text.Json.
using System;
using System.Diagnostics;
using System.Text;
using System.Text.RegularExpressions;

class EdgeRun {
    readonly Process process;
    int next;
    public EdgeRun(string model) {
        process = Process.Start(new ProcessStartInfo("edge-run", "rpc \"" + model + "\"") {
            RedirectStandardInput = true, RedirectStandardOutput = true, UseShellExecute = false, CreateNoWindow = true,
            StandardOutputEncoding = new UTF8Encoding(false) });
    }
    void Write(string line) {
        var bytes = new UTF8Encoding(false).GetBytes(line + "\n"); // without a byte order mark
        process.StandardInput.BaseStream.Write(bytes, 0, bytes.Length);
        process.StandardInput.BaseStream.Flush();
    }
    // Send a request and read up to its response; a notification for which `update` returns true cancels it.
    public string Request(string method, string parameters, Func<string, bool> update = null) {
        var id = ++next;
        Write("{\"jsonrpc\":\"2.0\",\"id\":" + id + ",\"method\":\"" + method + "\",\"params\":" + parameters + "}");
        for (string line; (line = process.StandardOutput.ReadLine()) != null;) {
            if (Field(line, "method") == null && Field(line, "id") == id.ToString()) return line;
            if (Field(line, "method") != null && update != null && update(line))
                Write("{\"jsonrpc\":\"2.0\",\"method\":\"$/cancelRequest\",\"params\":{\"id\":" + id + "}}");
        }
        throw new Exception("edge-run has ended");
    }
    public int Close() { process.StandardInput.Close(); process.WaitForExit(); return process.ExitCode; }
    // The first member of a name; strings are unescaped.
    public static string Field(string json, string name) {
        var found = Regex.Match(json, "\"" + name + "\":(?:\"((?:[^\"\\\\]|\\\\.)*)\"|([-+.\\w]+))");
        if (!found.Success) return null;
        return found.Groups[2].Success ? found.Groups[2].Value : Regex.Unescape(found.Groups[1].Value.Replace("\\/", "/"));
    }
    public static string Quote(string text) { return "\"" + text.Replace("\\", "\\\\").Replace("\"", "\\\"") + "\""; }
}

static class Client {
    static void Main(string[] args) {
        Console.OutputEncoding = new UTF8Encoding(false);
        var path = EdgeRun.Quote(args[0]);
        var model = args.Length > 1 ? args[1] : "shell-helper";
        var llm = new EdgeRun(model);
        Console.WriteLine("version " + EdgeRun.Field(llm.Request("initialize", "{\"protocol_version\":1}"), "protocol_version"));
        llm.Request("models/load", "{}", line => {
            Console.WriteLine("progress " + EdgeRun.Field(line, "stage") + " " + EdgeRun.Field(line, "fraction"));
            return false;
        });
        var chat = "\"messages\":[{\"role\":\"user\",\"content\":\"list files\"}],\"stream\":true,\"temperature\":0";
        var text = new StringBuilder();
        llm.Request("generate", "{" + chat + ",\"max_tokens\":24}", line => { text.Append(EdgeRun.Field(line, "content")); return false; });
        Console.WriteLine("answer " + text);
        var cancelled = llm.Request("generate", "{" + chat + ",\"ignore_eos\":true}", line => true);
        Console.WriteLine("cancelled " + EdgeRun.Field(cancelled, "code"));
        var session = EdgeRun.Quote(EdgeRun.Field(llm.Request("session/new", "{}"), "session_id"));
        var prompt = ",\"temperature\":0,\"max_tokens\":24,\"prompt\":";
        var said = llm.Request("session/prompt", "{\"session_id\":" + session + prompt + "\"list files\"}");
        Console.WriteLine("session " + EdgeRun.Field(said, "text"));
        llm.Request("session/save", "{\"session_id\":" + session + ",\"path\":" + path + "}");
        Console.WriteLine("end " + llm.Close());
        llm = new EdgeRun(model);
        llm.Request("initialize", "{\"protocol_version\":1}");
        session = EdgeRun.Quote(EdgeRun.Field(llm.Request("session/restore", "{\"path\":" + path + "}"), "session_id"));
        said = llm.Request("session/prompt", "{\"session_id\":" + session + prompt + "\"only hidden ones\"}");
        Console.WriteLine("restored " + EdgeRun.Field(said, "text"));
        Console.WriteLine("from the cache " + (EdgeRun.Field(said, "cached_tokens") != "0" ? "true" : "false"));
        Console.WriteLine("end " + llm.Close());
    }
}
