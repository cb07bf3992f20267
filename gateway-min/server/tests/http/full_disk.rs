//! A Postgres server without room on its disk, which triggers play: a run ends with the cause and what helps, what was
//! there is read, and once there is room the thread goes on.

use serde_json::json;

use crate::support::{Gateway, MODES, Setup, question, texts};

/// The tables of the checkpoints, and of the records.
const CHECKPOINTS: &str = "^threadkeep_(?!gateway_)";
const RECORDS: &str = "^threadkeep_gateway_";

const FUNCTION: &str = "CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    RAISE EXCEPTION 'could not extend file: No space left on device' USING ERRCODE = '53100'; END $$;";

/// From now on there is no room for these tables.
async fn fill(client: &tokio_postgres::Client, tables: &str) {
    let triggers = format!(
        "{FUNCTION} DO $$ DECLARE place text; BEGIN
            FOR place IN SELECT tablename FROM pg_tables WHERE schemaname = 'public' AND tablename ~ '{tables}' LOOP
                EXECUTE format('CREATE TRIGGER full_disk BEFORE INSERT OR UPDATE OR DELETE ON %I
                    FOR EACH ROW EXECUTE FUNCTION full_disk()', place);
            END LOOP; END $$"
    );
    client.batch_execute(&triggers).await.unwrap();
}

async fn make_room(client: &tokio_postgres::Client) {
    client.batch_execute("DROP FUNCTION full_disk() CASCADE").await.unwrap();
}

async fn runs(gateway: &Gateway) -> usize {
    gateway.get("/api/threads/t/runs").await.ok().as_array().unwrap().len()
}

#[tokio::test]
async fn a_full_disk_of_the_server_fails_a_run_with_the_remedy_and_loses_nothing() {
    for mode in MODES {
        let gateway = Setup::on("postgres", mode).start().await;
        gateway.create("t").await;
        gateway.ask("t", "one").await;
        let state = gateway.state("t").await;
        let client = gateway.postgres().await;

        fill(&client, CHECKPOINTS).await;
        let answer = gateway.post("/api/threads/t/runs/wait", question("two")).await.ok();
        let error = answer["error"].as_str().unwrap();
        assert_eq!(answer["status"], "error", "{answer}");
        assert!(error.contains("the server's disk is full; free some space, then retry"), "{mode}: {error}");
        assert!(error.contains("nothing was written") && !error.contains("in doubt"), "{mode}: {error}");
        let update = json!({"values": {"title": "Other"}});
        assert_eq!(gateway.post("/api/threads/t/state", update).await.status, 503);
        assert_eq!(gateway.state("t").await, state, "{mode}: what was there is read");
        make_room(&client).await;

        let before = runs(&gateway).await;
        fill(&client, RECORDS).await;
        let refused = gateway.post("/api/threads/t/runs/wait", question("three")).await;
        assert_eq!(refused.status, 503, "{mode}: {refused:?}");
        assert!(refused.headers.contains_key("retry-after"), "{mode}: {refused:?}");
        assert_eq!(runs(&gateway).await, before, "{mode}: no run is left");
        assert_eq!(gateway.state("t").await, state, "{mode}: what was there is read");
        make_room(&client).await;

        gateway.ask("t", "four").await;
        let said = gateway.state("t").await;
        assert_eq!(texts(&said), ["one", "You said: one", "four", "You said: four"], "{mode}");
    }
}
