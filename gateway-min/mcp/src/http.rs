//! The client for servers over HTTP, with what many servers do otherwise than the protocol says.

use std::collections::HashMap;
use std::sync::Arc;

use reqwest::header::{HeaderName, HeaderValue};
use rmcp::model::{ClientJsonRpcMessage, ErrorCode, JsonRpcMessage, RequestId};
use rmcp::transport::common::client_side_sse::BoxedSseResponse;
use rmcp::transport::streamable_http_client::{
    StreamableHttpClient, StreamableHttpError, StreamableHttpPostResponse, StreamableHttpResponseLimits,
};

type Headers = HashMap<HeaderName, HeaderValue>;
type HttpError = StreamableHttpError<reqwest::Error>;
type Answer = Result<StreamableHttpPostResponse, HttpError>;

/// A client for which an error always answers its request, and which knows a lost session by what servers say.
#[derive(Debug, Clone)]
pub(crate) struct Client(pub(crate) reqwest::Client);

impl StreamableHttpClient for Client {
    type Error = reqwest::Error;

    async fn post_message(
        &self,
        uri: Arc<str>,
        message: ClientJsonRpcMessage,
        session: Option<Arc<str>>,
        token: Option<String>,
        headers: Headers,
    ) -> Answer {
        let limits = StreamableHttpResponseLimits::default();
        self.post_message_with_response_limits(uri, message, session, token, headers, limits).await
    }

    async fn post_message_with_response_limits(
        &self,
        uri: Arc<str>,
        message: ClientJsonRpcMessage,
        session: Option<Arc<str>>,
        token: Option<String>,
        headers: Headers,
        limits: StreamableHttpResponseLimits,
    ) -> Answer {
        let request = match &message {
            JsonRpcMessage::Request(request) => Some(request.id.clone()),
            _ => None,
        };
        let is_in_session = session.is_some();
        let answer =
            self.0.post_message_with_response_limits(uri, message, session, token, headers, limits).await;
        if is_in_session && is_without_session(&answer, request.as_ref()) {
            // The connection is initialized again, and the request repeated: the server has done nothing.
            return Err(StreamableHttpError::SessionExpired);
        }
        match (answer, request) {
            // Often it has no id, or one of no request; the call would wait for another answer until its time is up.
            (Ok(StreamableHttpPostResponse::Json(JsonRpcMessage::Error(mut error), session)), Some(id)) => {
                error.id = Some(id);
                Ok(StreamableHttpPostResponse::Json(JsonRpcMessage::Error(error), session))
            }
            (answer, _) => answer,
        }
    }

    async fn delete_session(
        &self,
        uri: Arc<str>,
        session: Arc<str>,
        token: Option<String>,
        headers: Headers,
    ) -> Result<(), HttpError> {
        self.0.delete_session(uri, session, token, headers).await
    }

    async fn get_stream(
        &self,
        uri: Arc<str>,
        session: Option<Arc<str>>,
        last_event_id: Option<String>,
        token: Option<String>,
        headers: Headers,
    ) -> Result<BoxedSseResponse, HttpError> {
        self.0.get_stream(uri, session, last_event_id, token, headers).await
    }

    async fn get_stream_with_max_sse_event_size(
        &self,
        uri: Arc<str>,
        session: Option<Arc<str>>,
        last_event_id: Option<String>,
        token: Option<String>,
        headers: Headers,
        max_size: usize,
    ) -> Result<BoxedSseResponse, HttpError> {
        let stream =
            self.0.get_stream_with_max_sse_event_size(uri, session, last_event_id, token, headers, max_size);
        stream.await
    }
}

/// Whether a server that was started again does not know the session. The protocol wants 404, which is known without
/// this; many servers say it with 400 and an error that names no request. An error of the request itself is neither,
/// and one from within the server is not: it may have done something.
fn is_without_session(answer: &Answer, request: Option<&RequestId>) -> bool {
    let said = match answer {
        Ok(StreamableHttpPostResponse::Json(JsonRpcMessage::Error(error), _))
            if (error.id.is_none() || error.id.as_ref() != request)
                && error.error.code != ErrorCode::INTERNAL_ERROR =>
        {
            &*error.error.message
        }
        Err(StreamableHttpError::UnexpectedServerResponse(said)) if said.starts_with("HTTP 4") => &**said,
        _ => return false,
    };
    let said = said.to_ascii_lowercase();
    said.contains("session") || said.contains("not initialized")
}

#[cfg(test)]
mod tests {
    use rmcp::model::ErrorData;

    use super::*;

    /// The call would be repeated.
    #[test]
    fn an_error_from_within_a_server_is_not_a_lost_session() {
        let answer = |code: ErrorCode| -> Answer {
            let error = ErrorData::new(code, "The session of the database was closed", None);
            Ok(StreamableHttpPostResponse::Json(JsonRpcMessage::error(error, None), None))
        };
        assert!(is_without_session(&answer(ErrorCode(-32_000)), None));
        assert!(!is_without_session(&answer(ErrorCode::INTERNAL_ERROR), None));
    }
}
