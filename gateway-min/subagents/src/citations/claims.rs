//! Whether a report without a citation says that something was done.

use std::sync::LazyLock;

use regex::Regex;

/// From this length on, in characters, a report without a citation makes claims if there was anything to cite.
const LONG_REPORT_CHARS: usize = 240;

/// Verbs in the past tense that report an action.
const ENGLISH: &str = "added|adjusted|analy[sz]ed|applied|appended|built|called|changed|checked|cleaned|cloned|committed|\
    compiled|completed|configured|confirmed|converted|copied|corrected|created|deleted|deployed|downloaded|edited|\
    enabled|disabled|executed|extracted|fetched|fixed|found|generated|implemented|inserted|inspected|installed|invoked|\
    listed|merged|migrated|modified|moved|parsed|patched|processed|published|pushed|queried|ran|read|rebuilt|refactored|\
    removed|renamed|replaced|reproduced|resolved|restarted|retrieved|reverted|reviewed|rewrote|rewritten|saved|scanned|\
    searched|sent|started|stopped|stored|tested|updated|upgraded|uploaded|validated|verified|wrote|written";

/// The same in Chinese, Japanese and Korean, whose words have no spaces between them.
const CJK: &str = "创建|新建|新增|添加|修改|更改|更新|删除|移除|写入|读取|运行|执行|安装|测试|修复|实现|编辑|生成|保存|\
    验证|检查|确认|搜索|查找|下载|上传|部署|提交|合并|重命名|移动|替换|配置|编译|构建|完成|\
    創建|新增|刪除|寫入|讀取|運行|執行|安裝|測試|修復|實現|編輯|驗證|檢查|確認|搜尋|下載|上傳|\
    作成|変更|実行|修正|追加|削除|更新|保存|確認|検証|実装|生成|テスト|インストール|\
    생성|수정|삭제|실행|추가|설치|확인|저장|구현|테스트";

/// A path with a directory.
const PATH: &str = r"(?:^|[\s(`'\x22\[])(?:~?\.{0,2}/)?[\w.\-]+/[\w./\-]+";

/// A file with an extension.
const FILE: &str = r"\b[\w\-]{2,}\.[a-z][a-z0-9]{0,7}";

/// What is no part of a word before or after it. Words of Chinese, Japanese and Korean follow others without a space.
const BESIDE: &str = r"\W|\p{Han}|\p{Hiragana}|\p{Katakana}|\p{Hangul}";

/// Whether `report`, which cites nothing, claims something that a receipt could support. `had_receipts`: it could have
/// cited one.
pub(super) fn claims_actions(report: &str, had_receipts: bool) -> bool {
    #[allow(clippy::unwrap_used, reason = "a constant pattern")]
    static ACTION: LazyLock<Regex> = LazyLock::new(|| {
        let (before, after) = (format!("(?:^|{BESIDE})"), format!("(?:$|{BESIDE})"));
        Regex::new(&format!("{before}(?i:{ENGLISH}){after}|{CJK}|{PATH}|{FILE}{after}")).unwrap()
    });
    ACTION.is_match(report) || (had_receipts && report.trim().chars().count() >= LONG_REPORT_CHARS)
}
