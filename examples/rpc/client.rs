// A client of `edge-run rpc` with the standard library alone: rustc client.rs && ./client SAVED-SESSION [MODEL]
// It picks fields out of the JSON by hand; use serde_json in a program of your own.
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdout, Command, Stdio};

struct EdgeRun { child: Child, output: BufReader<ChildStdout>, next: u32 }

impl EdgeRun {
    fn start(model: &str) -> EdgeRun {
        let mut command = Command::new("edge-run");
        command.args(["rpc", model]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("edge-run starts");
        let output = BufReader::new(child.stdout.take().unwrap());
        EdgeRun { child, output, next: 1 }
    }
    fn write(&mut self, message: String) {
        let input = self.child.stdin.as_mut().unwrap();
        writeln!(input, "{message}").and_then(|()| input.flush()).expect("edge-run reads");
    }
    /// Send a request and read up to its response; a notification for which `update` is true cancels it.
    fn request(&mut self, method: &str, params: &str, mut update: impl FnMut(&str) -> bool) -> String {
        let id = self.next;
        self.next += 1;
        self.write(format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"{method}","params":{params}}}"#));
        loop {
            let mut line = String::new();
            assert!(self.output.read_line(&mut line).expect("UTF-8") > 0, "edge-run has ended");
            if field(&line, "method").is_none() && field(&line, "id") == Some(id.to_string()) { return line; }
            if field(&line, "method").is_some() && update(&line) {
                self.write(format!(r#"{{"jsonrpc":"2.0","method":"$/cancelRequest","params":{{"id":{id}}}}}"#));
            }
        }
    }
    fn close(mut self) -> i32 {
        drop(self.child.stdin.take());
        self.child.wait().unwrap().code().unwrap_or(-1)
    }
}

/// The first member of a name; strings are unescaped.
fn field(json: &str, name: &str) -> Option<String> {
    let rest = json.split_once(&format!("\"{name}\":"))?.1;
    if !rest.starts_with('"') { return Some(rest.split([',', '}', ']']).next()?.to_string()); }
    let (mut units, mut chars) = (Vec::new(), rest[1..].chars());
    loop {
        let char = match chars.next()? {
            '"' => return Some(String::from_utf16_lossy(&units)),
            '\\' => match chars.next()? {
                'u' => { units.push(u16::from_str_radix(&chars.by_ref().take(4).collect::<String>(), 16).ok()?); continue }
                'n' => '\n', 't' => '\t', 'r' => '\r', 'b' => '\u{8}', 'f' => '\u{c}', other => other,
            },
            other => other,
        };
        units.extend_from_slice(char.encode_utf16(&mut [0; 2]));
    }
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let (path, model) = (&args[1], args.get(2).map_or("shell-helper", String::as_str));
    let quiet = |_: &str| false;
    let text_of = |json: &str, name: &str| field(json, name).unwrap_or_default();
    let mut llm = EdgeRun::start(model);
    let begun = llm.request("initialize", r#"{"protocol_version":1}"#, quiet);
    println!("version {}", text_of(&begun, "protocol_version"));
    llm.request("models/load", "{}", |line| {
        println!("progress {} {}", text_of(line, "stage"), text_of(line, "fraction"));
        false
    });
    let chat = r#""messages":[{"role":"user","content":"list files"}],"stream":true,"temperature":0"#;
    let mut text = String::new();
    llm.request("generate", &format!(r#"{{{chat},"max_tokens":24}}"#), |line| { text += &text_of(line, "content"); false });
    println!("answer {text}");
    let cancelled = llm.request("generate", &format!(r#"{{{chat},"ignore_eos":true}}"#), |_| true);
    println!("cancelled {}", text_of(&cancelled, "code"));
    let session = text_of(&llm.request("session/new", "{}", quiet), "session_id");
    let prompt = |session: &str, text: &str| {
        format!(r#"{{"session_id":"{session}","prompt":"{text}","temperature":0,"max_tokens":24}}"#)
    };
    println!("session {}", text_of(&llm.request("session/prompt", &prompt(&session, "list files"), quiet), "text"));
    llm.request("session/save", &format!(r#"{{"session_id":"{session}","path":{path:?}}}"#), quiet);
    println!("end {}", llm.close());
    let mut llm = EdgeRun::start(model);
    llm.request("initialize", r#"{"protocol_version":1}"#, quiet);
    let restored = llm.request("session/restore", &format!(r#"{{"path":{path:?}}}"#), quiet);
    let said = llm.request("session/prompt", &prompt(&text_of(&restored, "session_id"), "only hidden ones"), quiet);
    println!("restored {}", text_of(&said, "text"));
    println!("from the cache {}", text_of(&said, "cached_tokens") != "0");
    println!("end {}", llm.close());
}
