//! A browser that a test controls, over WebDriver.

use std::time::{Duration, Instant};

use reqwest::{Client, Method};
use serde_json::{Value, json};
use threadkeep_testing::Browser;

/// How long a test waits for something to be seen.
const PATIENCE: Duration = Duration::from_mins(10);
/// How often it looks.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// The name under which WebDriver has the id of an element.
const ELEMENT: &str = "element-6066-11e4-a52e-4f735466cecf";

/// A window of a browser.
pub(crate) struct Window {
    client: Client,
    session: String,
    base: String,
    _browser: Browser,
}

impl Window {
    /// Opens a window for the gateway at `base`.
    pub(crate) async fn open(base: &str) -> Self {
        let browser = Browser::start().unwrap();
        rustls::crypto::ring::default_provider().install_default().ok();
        let client = Client::builder().no_proxy().build().unwrap();
        let mut arguments = browser.arguments().to_vec();
        arguments.push("--window-size=1200,900".to_owned());
        let wanted = json!({"capabilities": {"alwaysMatch": {
            "goog:chromeOptions": {"args": arguments},
            "goog:loggingPrefs": {"browser": "ALL"},
            "timeouts": {"script": PATIENCE.as_millis(), "pageLoad": PATIENCE.as_millis()},
        }}});
        let new = format!("{}/session", browser.url());
        let mut window = Self { client, session: new, base: base.to_owned(), _browser: browser };
        let session = window.command(Method::POST, "", wanted).await;
        window.session = format!("{}/{}", window.session, session["sessionId"].as_str().unwrap());
        window
    }

    async fn command(&self, method: Method, path: &str, body: Value) -> Value {
        let value = self.answer(method, path, body).await;
        assert!(value.get("error").is_none(), "{path}: {value}");
        value
    }

    /// The answer to a command, which may be an error.
    async fn answer(&self, method: Method, path: &str, body: Value) -> Value {
        let request = self.client.request(method.clone(), format!("{}{path}", self.session));
        let request = if method == Method::POST { request.json(&body) } else { request };
        let mut answer: Value = request.send().await.unwrap().json().await.unwrap();
        answer["value"].take()
    }

    /// Does something to the element with this selector. A page that is shown again meanwhile has another one, which
    /// may be hidden until the page is shown once more, or below another element.
    async fn on(&self, selector: &str, what: &str, body: Value) {
        let passing = ["stale element reference", "element not interactable", "element click intercepted"];
        let until = Instant::now() + PATIENCE;
        loop {
            let element = self.element(selector).await;
            let answer = self.answer(Method::POST, &format!("/element/{element}/{what}"), body.clone()).await;
            if answer.get("error").is_none() {
                return;
            }
            let passes = passing.iter().any(|error| answer["error"] == *error) && Instant::now() < until;
            assert!(passes, "{selector}: {answer}");
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Goes to an address of the gateway.
    pub(crate) async fn go(&self, path: &str) {
        self.command(Method::POST, "/url", json!({"url": format!("{}{path}", self.base)})).await;
    }

    /// The path and the query of the address that is shown.
    pub(crate) async fn place(&self) -> String {
        let url = self.command(Method::GET, "/url", Value::Null).await;
        url.as_str().unwrap().strip_prefix(&self.base).unwrap().to_owned()
    }

    /// The value of an expression of the page's script.
    pub(crate) async fn value(&self, expression: &str) -> Value {
        self.command(Method::POST, "/execute/sync", returning(expression)).await
    }

    /// Waits until an expression is true. Until the browser has left a page, or has the whole of the next one, it may
    /// fail.
    pub(crate) async fn until(&self, expression: &str) {
        let mut last = Value::Null;
        let waiting = async {
            loop {
                let script = returning(&format!("Boolean({expression})"));
                last = self.answer(Method::POST, "/execute/sync", script).await;
                if last == true {
                    return;
                }
                tokio::time::sleep(LOOK_EVERY).await;
            }
        };
        if tokio::time::timeout(PATIENCE, waiting).await.is_err() {
            let shown = self.value("document.body.innerText").await;
            let log = self.log().await;
            let shown = shown.as_str().unwrap_or_default();
            panic!("never: {expression}: {last}\nlog: {log:?}\nshown: {shown}");
        }
    }

    /// Waits until the page shows a text.
    pub(crate) async fn sees(&self, text: &str) {
        self.until(&format!("document.body.innerText.includes({})", json!(text))).await;
    }

    /// Waits for the element with this selector, and returns its id. A page that is shown again meanwhile may lack it.
    async fn element(&self, selector: &str) -> String {
        loop {
            self.until(&format!("document.querySelector({})", json!(selector))).await;
            let wanted = json!({"using": "css selector", "value": selector});
            let found = self.answer(Method::POST, "/element", wanted).await;
            if found["error"] != "no such element" {
                return found[ELEMENT].as_str().unwrap_or_else(|| panic!("{selector}: {found}")).to_owned();
            }
        }
    }

    /// Clicks, as a person does.
    pub(crate) async fn click(&self, selector: &str) {
        self.on(selector, "click", json!({})).await;
    }

    /// Types into a field, as a person does; `\u{e007}` is the Enter key.
    pub(crate) async fn type_into(&self, selector: &str, text: &str) {
        self.on(selector, "value", json!({"text": text})).await;
    }

    /// Empties a field.
    pub(crate) async fn clear(&self, selector: &str) {
        self.on(selector, "clear", json!({})).await;
    }

    /// Runs a script that calls back with its result, which this returns.
    pub(crate) async fn called_back(&self, script: &str) -> Value {
        self.command(Method::POST, "/execute/async", json!({"script": script, "args": []})).await
    }

    /// Makes the window this wide and high, in pixels.
    pub(crate) async fn resize(&self, width: u32, height: u32) {
        self.command(Method::POST, "/window/rect", json!({"width": width, "height": height})).await;
    }

    /// What the browser has logged since the last call: errors of scripts, and what the policy refused.
    pub(crate) async fn log(&self) -> Vec<String> {
        let entries = self.command(Method::POST, "/se/log", json!({"type": "browser"})).await;
        let entries = entries.as_array().unwrap().iter();
        entries.map(|entry| entry["message"].as_str().unwrap().to_owned()).collect()
    }
}

/// The body of a command that runs a script which returns an expression.
fn returning(expression: &str) -> Value {
    json!({"script": format!("return {expression}"), "args": []})
}
