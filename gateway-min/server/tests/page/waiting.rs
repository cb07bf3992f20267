//! What waits for a person: questions of the agent, and runs that were stopped.

use crate::driver::Window;
use crate::gateway::Gateway;
use crate::{AT_REST, ENTER, click_for_notice, complaints, conversation, script};

#[tokio::test]
async fn a_question_is_answered_by_choosing_or_in_ones_own_words() {
    let gateway = Gateway::start(&script(), "delta", false);
    let window = Window::open(&gateway.base).await;
    let thread = gateway.thread().await;
    window.go(&format!("/threads/{thread}")).await;
    for (choose, answer) in [(true, "blue"), (false, "any warm one")] {
        window.until(AT_REST).await;
        window.type_into("#say", &format!("paint it{ENTER}")).await;
        window.until("document.querySelector('form.asks legend')?.innerText === 'Which colour?'").await;
        window.until(AT_REST).await;
        click_for_notice(&window, "form.asks button", "Answer each question.").await;
        if choose {
            window.click("form.asks input[value=blue]").await;
            // What is chosen stays when the page is shown again.
            window.value("refresh()").await;
            window.until("document.querySelector('form.asks input:checked')?.value === 'blue'").await;
            window.click("form.asks button").await;
        } else {
            window.type_into("form.asks input[type=text]", &format!("{answer}{ENTER}")).await;
        }
        window.sees(&format!("You said: {answer}")).await;
        window.until(AT_REST).await;
        window.until("document.querySelector('form.asks') === null").await;
    }
    // The box answers too.
    window.type_into("#say", &format!("paint it{ENTER}")).await;
    window.until("document.querySelector('form.asks')").await;
    window.until(AT_REST).await;
    window.type_into("#say", &format!("green{ENTER}")).await;
    window.sees("You said: green").await;
    window.until("document.querySelector('form.asks') === null").await;
    assert_eq!(complaints(&window).await, Vec::<String>::new());
}

#[tokio::test]
async fn a_run_that_a_person_stopped_is_continued() {
    let gateway = Gateway::start(&script(), "delta", false);
    let (window, _) = conversation(&gateway).await;
    window.type_into("#say", &format!("please hang{ENTER}")).await;
    window.until("document.querySelector('#live .agent .text')?.textContent.startsWith('This')").await;
    window.click("#stop").await;
    window.sees("The run was stopped before model").await;
    window.until(AT_REST).await;
    window.click("form.asks button").await;
    window.until("document.querySelector('#live .agent .text')?.textContent.startsWith('This')").await;
    // The answer streams on another connection than the one that says that the run has begun.
    window.until("document.querySelector('form.asks') === null").await;
    window.click("#stop").await;
    window.sees("The run was stopped before model").await;
    assert_eq!(complaints(&window).await, Vec::<String>::new());
}

#[tokio::test]
async fn a_goal_is_set_pursued_and_cleared() {
    let gateway = Gateway::start(&script(), "delta", false);
    let (window, _) = conversation(&gateway).await;
    window.click(".goal summary").await;
    window.type_into("#objective", "A garden").await;
    // What is written stays when the page is shown again.
    window.value("refresh()").await;
    window.until("document.querySelector('#objective').value === 'A garden'").await;
    window.click("form[data-does=goal] button").await;
    window.until("document.querySelector('.goal .summary').innerText === 'A garden'").await;
    window.until("document.querySelector('#objective').value === ''").await;
    // The model that judges says that it is reached, so the goal is gone after the run.
    window.type_into("#say", &format!("plant{ENTER}")).await;
    window.sees("You said: plant").await;
    window.until("document.querySelector('.goal .summary').innerText.startsWith('None')").await;
    window.until(AT_REST).await;

    window.type_into("#objective", "Another garden").await;
    window.click("form[data-does=goal] button").await;
    window.until("document.querySelector('.goal .summary').innerText === 'Another garden'").await;
    window.click("button[data-do=unset]").await;
    window.until("document.querySelector('.goal .summary').innerText.startsWith('None')").await;
    assert_eq!(complaints(&window).await, Vec::<String>::new());
}
